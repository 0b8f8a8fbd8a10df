"""Independent counts: tokens that went into the model, bytes that came out of the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvstore.api import KVStore, Load, LoadedBlock, Match, Readers, Reservation, Status
from kvstore.layout import BLOCK_TOKENS
from kvstore.namespace import Namespace
from kvstore.units import UnitMark


class TokenCounter:
    """Counts the tokens that enter a model, by a hook on its embedding."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.forwarded = 0
        self.on_tokens: Callable[[int], None] | None = None
        self._hook = model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        tokens = int(inputs[0].numel())
        self.forwarded += tokens
        if self.on_tokens is not None:
            self.on_tokens(tokens)

    def take(self) -> int:
        """Tokens since the last time."""
        tokens, self.forwarded = self.forwarded, 0
        return tokens

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()


@dataclass(frozen=True, slots=True)
class Transferred:
    """What loads brought: blocks and bytes, and the seconds in which they came.

    ``opening``: seconds before that until the store had opened the stream, which after a
    restart takes in a new connection and a new mapping of the arena.
    """

    blocks: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    opening: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes a second, 0 if nothing came."""
        return self.nbytes / self.seconds if self.nbytes else 0.0


class MeteredStore:
    """A ``KVStore`` that passes all on to another one, and notes what was loaded and asked for."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self.loaded = Transferred()
        self.hashes: Sequence[bytes] = ()  # of the last Match

    def take(self) -> Transferred:
        """What was loaded since the last time."""
        loaded, self.loaded = self.loaded, Transferred()
        return loaded

    def note(self, load: Transferred) -> None:
        """Add a load that has ended."""
        so_far = self.loaded
        self.loaded = Transferred(
            so_far.blocks + load.blocks,
            so_far.nbytes + load.nbytes,
            so_far.seconds + load.seconds,
            so_far.opening + load.opening,
        )

    def open_namespace(self, namespace: Namespace) -> bytes:
        return self._store.open_namespace(namespace)

    def match(
        self,
        namespace: bytes,
        hashes: Sequence[bytes],
        tokens: int,
        *,
        align: int = BLOCK_TOKENS,
        store: bool = False,
        counted: int = 0,
    ) -> Match:
        self.hashes = tuple(hashes)
        return self._store.match(namespace, hashes, tokens, align=align, store=store, counted=counted)

    def load(
        self,
        namespace: bytes,
        hashes: Sequence[bytes],
        *,
        first: int = 0,
        timeout: float = 60.0,
        readers: Readers | None = None,
        counted: int = 0,
    ) -> MeteredLoad:
        start = time.perf_counter()
        load = self._store.load(
            namespace, hashes, first=first, timeout=timeout, readers=readers, counted=counted
        )
        return MeteredLoad(self, load, time.perf_counter() - start)

    def reserve(
        self,
        namespace: bytes,
        parent: bytes,
        hashes: Sequence[bytes],
        *,
        lease: int = 0,
        epoch: int | None = None,
    ) -> Reservation:
        return self._store.reserve(namespace, parent, hashes, lease=lease, epoch=epoch)

    def commit(self, lease: int, hashes: Sequence[bytes], units: Sequence[UnitMark] = ()) -> int:
        return self._store.commit(lease, hashes, units)

    def durable(self, ticket: int, *, timeout: float = 60.0) -> bool:
        return self._store.durable(ticket, timeout=timeout)

    def release(self, lease: int) -> None:
        self._store.release(lease)

    def status(self) -> Status:
        return self._store.status()

    def close(self) -> None:
        self._store.close()


class MeteredLoad:
    """A ``Load`` that tells its store what came through it."""

    def __init__(self, store: MeteredStore, load: Load, opening: float) -> None:
        self._store, self._load, self._opening = store, load, opening
        self._start = time.perf_counter()
        self._blocks = self._bytes = 0

    @property
    def short(self) -> int | None:
        return self._load.short

    def __enter__(self) -> Self:
        self._load.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._load.__exit__(kind, error, trace)
        seconds = time.perf_counter() - self._start
        self._store.note(Transferred(self._blocks, self._bytes, seconds, self._opening))

    def __iter__(self) -> Iterator[list[LoadedBlock]]:
        for batch in self._load:
            self._blocks += len(batch)
            self._bytes += sum(block.data.nbytes for block in batch)
            yield batch
