"""Documents prefilled ahead of time: what ``latentkv warm`` does with a model.

Found by the entry point ``latentkv.warmers``, for the command lives in ``server``, which knows no torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.api import KVStore
from kvstore.errors import InvalidArgument
from mla.errors import Unsupported
from mla.models import TINY, NamedModel, load_checkpoint, load_tiny, open_device
from mla.session import PREFILL_CHUNK, Session

_ROOM = 2  # chunks of a pool beside its longest document


@dataclass(frozen=True, slots=True)
class Warmed:
    """One document. ``whole_tokens`` is what of it can be stored: whole blocks, or chunks in exact mode."""

    name: str
    tokens: int
    whole_tokens: int
    computed_tokens: int
    stored_tokens: int
    nbytes: int  # that it takes in the store
    seconds: float
    unit: str = ""  # name of its unit, if it has one

    @property
    def done(self) -> bool:
        """Whether all of it that can be stored is."""
        return self.stored_tokens == self.whole_tokens


class Warmer:
    """A model in front of a store, which has documents prefilled. Close it, or use it as a context."""

    def __init__(
        self,
        store: KVStore,
        model: str,
        *,
        device: str | None = None,
        exact: bool = False,
        prefill_chunk: int = PREFILL_CHUNK,
        tenant: str = "default",
        salt: str = "",
    ) -> None:
        """``model``: a checkpoint's directory, or ``tiny``; the rest as for ``Session``.

        Raises ``InvalidArgument``, ``NotMLA`` and ``Unsupported`` for a model that cannot be used.
        """
        self._named = _load(model, device)
        self._store = store
        self._exact, self._chunk = exact, prefill_chunk
        self._tenant, self._salt = tenant, salt
        self._session: Session | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            self._session.close()

    def read(self, text: bytes) -> NDArray[np.uint32]:
        """A document's token ids. Raises ``InvalidArgument`` for one that the model has no positions for."""
        tokens = self._named.tokenize(text)
        limit = int(self._named.model.config.max_position_embeddings)
        if len(tokens) > limit:
            raise InvalidArgument(f"{len(tokens)} tokens, and the model has {limit} positions")
        return tokens

    def warm(self, documents: Sequence[tuple[str, NDArray[np.uint32]]]) -> Iterator[Warmed]:
        """Prefill documents, given by name and tokens, in this order; each once it is in the store."""
        session = self._open(max((len(tokens) for _, tokens in documents), default=0))
        layout = session.pool.layout
        align = self._chunk if self._exact else layout.block_tokens
        for name, tokens in documents:
            began = time.monotonic()
            whole = len(tokens) - len(tokens) % align
            if not whole:
                yield Warmed(name, len(tokens), 0, 0, 0, 0, 0.0)
                continue
            made = session.prefill(tokens)
            seconds = time.monotonic() - began
            yield Warmed(
                name,
                made.tokens,
                whole,
                made.computed_tokens,
                made.stored_tokens,
                made.stored_tokens * layout.token_bytes,
                seconds,
                made.unit.hex() if made.unit is not None else "",
            )

    def flush(self, timeout: float) -> bool:
        """Wait until everything is on disk; False if some of it is not."""
        return self._session is None or self._session.flush(timeout)

    def _open(self, longest: int) -> Session:
        self._session = Session(
            self._named.model,
            self._store,
            exact=self._exact,
            prefill_chunk=self._chunk,
            pool_tokens=longest + _ROOM * self._chunk,
            tenant=self._tenant,
            salt=self._salt,
        )
        return self._session


def _load(model: str, device: str | None) -> NamedModel:
    logging.getLogger("transformers").setLevel(logging.ERROR)  # sampling options that a prefill ignores
    target = open_device(device)
    if model == TINY and not Path(model).exists():
        return load_tiny(target)
    try:
        return load_checkpoint(Path(model), target)
    except (OSError, ValueError, Unsupported, KeyError) as error:
        line = str(error).strip().partition("\n")[0]
        raise InvalidArgument(f"--model {model}: {line}") from None
