"""The worker: match, load, prefill the suffix, store, and give the answer.

Nothing that happens to the store reaches the caller: it costs a miss and a counter.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from kvstore.api import KVStore, Match, MissReason, Tier
from kvstore.errors import InvalidArgument, NamespaceUnknown
from kvstore.hashing import ROOT, Tokens, as_tokens, block_hashes
from kvstore.namespace import DIGEST_BYTES, Namespace
from kvstore.units import PersistPoint, UnitKind, plan_output
from mla.adapters.transformers import attach, cache_argument
from mla.cache import LatentCache
from mla.errors import PoolFull, Unsupported
from mla.fingerprint import weights_fingerprint
from mla.numerics import numerics
from mla.pool import LatentPool
from mla.prefix import Prefix, PrefixLoader
from mla.rope import check_rope_length
from mla.storing import StoreJob, StoreQueue
from mla.usage import Generation, Usage

log = logging.getLogger(__name__)
Result = TypeVar("Result")

PREFILL_CHUNK = 512  # tokens
POOL_TOKENS = 32768

# Ways to decode that a cache which starts with a prefix makes silently wrong.
_REFUSED = (
    "prompt_lookup_num_tokens",
    "assistant_model",
    "inputs_embeds",
    "attention_mask",
    "past_key_values",
)


@dataclass(slots=True)
class _Request:
    tokens: NDArray[np.uint32]
    hashes: list[bytes]
    key: bytes  # namespace digest, or a key of this process while the store is away
    match: Match
    stored_until: int  # tokens of the prompt that may be stored
    job: StoreJob | None = None
    queued: int = 0  # blocks handed to the job
    units: dict[int, UnitKind] | None = None


class Session:
    """One model with a device pool in front of a store. Serves one request at a time.

    ``exact``: answers are bit-identical with and without a hit (DESIGN section 7): hits and
    stored blocks end at multiples of ``prefill_chunk``, and blocks are shared only with
    sessions of equal numerics. ``store`` may be None: then the pool is the only tier.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: KVStore | None,
        *,
        exact: bool = False,
        prefill_chunk: int = PREFILL_CHUNK,
        pool_tokens: int = POOL_TOKENS,
        model_name: str = "",
        revision: str | None = None,
        tenant: str = "default",
        adapter: str = "",
        salt: str = "",
        load_timeout: float = 30.0,
        store_deadline: float = 30.0,
    ) -> None:
        """Attaches the model. ``revision`` defaults to a fingerprint of the weights.

        Raises ``NotMLA`` and ``Unsupported`` for a model that cannot be served right.
        """
        info = attach(model)
        size = info.layout.block_tokens
        if prefill_chunk < size or prefill_chunk % size:
            raise InvalidArgument(f"prefill_chunk={prefill_chunk} is no positive multiple of {size} tokens")
        self._model = model
        self._info = info
        self._exact = exact
        self._chunk = prefill_chunk
        self._store = store
        self._namespace = Namespace(
            layout=info.layout,
            model=model_name or str(model.config.model_type),
            revision=weights_fingerprint(model) if revision is None else revision,
            tenant=tenant,
            rope=info.rope,
            rope_layout=info.rope_layout,
            adapter=adapter,
            salt=salt,
            numerics=numerics(prefill_chunk, model.device) if exact else "",
        )
        self._digest: bytes | None = None
        self._local_key = secrets.token_bytes(DIGEST_BYTES)
        self.pool = LatentPool(info.layout, -(-pool_tokens // size), model.device)
        self._loader = PrefixLoader(self.pool, align=self._align, timeout=load_timeout)
        self._queue = StoreQueue(self.pool, store, deadline=store_deadline) if store else None
        self.counters: Counter[str] = Counter()

    @property
    def _align(self) -> int:
        return self._chunk if self._exact else self._info.layout.block_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, input_ids: Tokens | Tensor, **options: Any) -> Generation:
        """Continue a prompt; ``options`` are those of ``model.generate``.

        Raises ``InvalidTokens`` for a bad prompt, ``Unsupported`` for a way of decoding
        that is not right with a cached prefix, and ``PoolFull`` when prompt and answer do
        not fit into the pool.
        """
        self._refuse(options)
        tokens = as_tokens(_flat(input_ids))
        check_rope_length(self._info.max_tokens, len(tokens))
        request = self._open(tokens)
        self._make_room(len(tokens), options)
        prefix = self._prefix(request)
        cache = LatentCache.from_prefix(self.pool, prefix.blocks, len(prefix.blocks) * self._block)
        try:
            with torch.inference_mode():
                self._prefill(request, cache)
                return self._decode(request, cache, prefix, options)
        finally:
            cache.release()
            if request.job is not None:
                request.job.finish()

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until what was generated so far is on disk; False if some of it is not."""
        return self._queue is not None and self._queue.flush(timeout)

    def close(self, timeout: float = 60.0) -> None:
        """Store what is queued and end the background thread. The model stays attached."""
        if self._queue is not None:
            self._queue.close(timeout)

    # --- before the model

    @property
    def _block(self) -> int:
        return self._info.layout.block_tokens

    def _refuse(self, options: dict[str, Any]) -> None:
        for name in _REFUSED:
            if options.get(name) is not None:
                raise Unsupported(f"{name} in a stored session: it does not fit a cache with a loaded prefix")
        if options.get("use_cache") is False:
            raise Unsupported("use_cache=False in a stored session: call the model itself")
        if self._exact and _rows(options) > 1:
            raise Unsupported("beams or several answers in exact mode: its bits are those of batch size 1")

    def _open(self, tokens: NDArray[np.uint32]) -> _Request:
        key = self._open_namespace()
        hashes = block_hashes(key or self._local_key, tokens, block_tokens=self._block)
        match = Match(reason=MissReason.UNAVAILABLE)
        if self._store is not None and key is not None:
            match = self._guard("match", lambda: self._match(key, hashes, len(tokens)), match)
        whole = len(tokens) - len(tokens) % self._align
        request = _Request(tokens, hashes, key or self._local_key, match, whole)
        if self._queue is not None and match.reason is not MissReason.UNAVAILABLE:
            request.job = self._queue.job(request.key)
            request.units = self._units(match.persist_points, whole)
        return request

    def _open_namespace(self) -> bytes | None:
        if self._digest is None and self._store is not None:
            store = self._store
            self._digest = self._guard("open_namespace", lambda: store.open_namespace(self._namespace), None)
        return self._digest

    def _match(self, key: bytes, hashes: Sequence[bytes], tokens: int) -> Match:
        assert self._store is not None
        try:
            return self._store.match(key, hashes, tokens, align=self._align, store=True)
        except NamespaceUnknown:
            self._digest = None  # the data directory is another one: open it with the next request
            raise

    def _units(self, points: Sequence[PersistPoint], whole: int) -> dict[int, UnitKind]:
        """Depths in blocks at which this prompt leaves units.

        In exact mode the last, partial chunk is not stored, so the end moves before it.
        """
        units: dict[int, UnitKind] = {}
        for point in points:
            at = min(point.tokens, whole) if point.kinds & UnitKind.REQUEST_END else point.tokens
            if 0 < at <= whole:
                depth = at // self._block
                units[depth] = units.get(depth, UnitKind.NONE) | point.kinds
        return units

    def _make_room(self, tokens: int, options: dict[str, Any]) -> None:
        """Give up queued stores if the pool would not hold this request beside them."""
        answer = int(options.get("max_new_tokens") or self._model.generation_config.max_new_tokens or 1)
        if self._queue is not None and self.pool.available * self._block < tokens + answer + self._block:
            self._queue.drop(timeout=5.0)
            self.counters["stores_dropped_for_room"] += 1

    def _prefix(self, request: _Request) -> Prefix:
        usable = (len(request.tokens) - 1) // self._align * self._align // self._block
        taken = self._loader.take(request.hashes[:usable])
        prefix = Prefix(taken, {Tier.DEVICE: len(taken)})
        if self._store is None or request.match.blocks <= len(taken):
            return prefix
        store = self._store
        return self._guard(
            "load",
            lambda: self._loader.load(store, request.key, request.hashes, taken, request.match),
            prefix,
        )

    # --- the model

    def _prefill(self, request: _Request, cache: LatentCache) -> None:
        """Forward whole chunks, which end at absolute multiples of the chunk; decoding does the rest."""
        forward = self._model.base_model
        name = cache_argument(self._model)
        start = cache.tokens
        while (stop := start - start % self._chunk + self._chunk) < len(request.tokens):
            forward(input_ids=self._tensor(request.tokens[start:stop]), use_cache=True, **{name: cache})
            self._keep(request, cache, stop)
            start = stop

    def _decode(
        self, request: _Request, cache: LatentCache, prefix: Prefix, options: dict[str, Any]
    ) -> Generation:
        prompt = self._tensor(request.tokens)
        rows = _rows(options)
        if rows > 1:
            cache.batch_repeat_interleave(rows)
        output = cast(Any, self._model).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **{cache_argument(self._model): cache},
            **options | {"return_dict_in_generate": True},
        )
        sequences: Tensor = output.sequences
        new = sequences[0, prompt.shape[1] :].tolist()
        self._keep(request, cache, min(cache.tokens, len(request.tokens)))
        if rows == 1 and not self._exact:
            self._keep_answer(request, cache, new)
        return Generation(new, sequences, self._usage(request, prefix, len(new)), output.get("logits"))

    def _tensor(self, tokens: NDArray[np.uint32]) -> Tensor:
        return torch.from_numpy(tokens.astype(np.int64))[None].to(self._model.device)

    # --- behind the model

    def _keep(self, request: _Request, cache: LatentCache, tokens: int) -> None:
        """``tokens`` tokens are in the pool: make full blocks findable, and queue them for the store."""
        until = min(tokens, request.stored_until) // self._block
        blocks = cache.block_table()[request.queued : until]
        hashes = request.hashes[request.queued : until]
        if not blocks:
            return
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.pool.register(block, block_hash)
        if request.job is not None:
            request.job.add(hashes, blocks, request.units or {})
        request.queued = until

    def _keep_answer(self, request: _Request, cache: LatentCache, new: list[int]) -> None:
        """The answer's full blocks: what a second turn will start with."""
        prompt, total = len(request.tokens), len(request.tokens) + len(new)
        points = plan_output(prompt, total, interval=request.match.interval, block_tokens=self._block)
        tail = np.concatenate([request.tokens, np.asarray(new, np.uint32)])[request.queued * self._block :]
        parent = request.hashes[-1] if request.hashes else ROOT
        cached = tail[: cache.tokens - request.queued * self._block]
        if len(cached) < self._block:
            return
        request.hashes += block_hashes(request.key, cached, parent=parent, block_tokens=self._block)
        request.stored_until = cache.tokens
        request.units = {point.tokens // self._block: point.kinds for point in points}
        self._keep(request, cache, cache.tokens)

    def _usage(self, request: _Request, prefix: Prefix, new: int) -> Usage:
        hit = len(prefix.blocks) * self._block
        tiers = {tier: blocks * self._block for tier, blocks in prefix.by_tier.items() if blocks}
        self.counters["hit_tokens"] += hit
        self.counters["miss_tokens"] += len(request.tokens) - hit
        return Usage(
            prompt_tokens=len(request.tokens),
            completion_tokens=new,
            prompt_cache_hit_tokens=hit,
            prompt_cache_miss_tokens=len(request.tokens) - hit,
            hit_tokens_by_tier=tiers,
            miss_reason=request.match.reason,
        )

    def _guard(self, verb: str, work: Callable[[], Result], miss: Result) -> Result:
        """Whatever the store does wrong is a miss and a counter, never an error of the model's path."""
        try:
            return work()
        except PoolFull:
            raise
        except Exception as error:  # noqa: BLE001 - rule 3: a cache is never in the way
            self.counters[f"{verb}_failed"] += 1
            log.warning("event=store_failed verb=%s kind=%s reason=%s", verb, type(error).__name__, error)
            return miss


def _rows(options: dict[str, Any]) -> int:
    return max(int(options.get("num_beams") or 1), int(options.get("num_return_sequences") or 1))


def _flat(input_ids: Tokens | Tensor) -> Tokens:
    if not isinstance(input_ids, Tensor):
        return input_ids
    if input_ids.dim() == 2 and input_ids.shape[0] != 1:
        raise Unsupported(
            f"a batch of {input_ids.shape[0]} prompts in a stored session: pass one prompt at a time,"
            " unpadded"
        )
    return cast(Tokens, input_ids.reshape(-1).cpu().numpy())
