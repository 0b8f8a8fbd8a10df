"""The worker: match, load, prefill the suffix, store, and give the answer.

Nothing that happens to the store reaches the caller: it costs a miss and a counter.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from kvstore.api import KVStore, Match, MissReason, Tier
from kvstore.ending import end_when_dropped
from kvstore.errors import InvalidArgument, NamespaceUnknown
from kvstore.hashing import ROOT, block_hashes
from kvstore.namespace import DIGEST_BYTES, Namespace
from kvstore.units import plan_output, units_by_depth
from mla.adapters.transformers import attach, cache_argument, decoder_of
from mla.cache import LatentCache
from mla.decoding import Decoding, check_room, plan_decoding, positions_of
from mla.entrance import check_state, check_unmoved
from mla.guard import or_miss
from mla.numerics import numerics
from mla.pool import LatentPool
from mla.prefix import Prefix, PrefixLoader
from mla.prompts import Prompt, read_prompt, vocabulary_of
from mla.request import Request
from mla.storing import StoreQueue
from mla.usage import Generation, Prefilled, Usage
from mla.weights import Weights

Result = TypeVar("Result")

PREFILL_CHUNK = 512  # tokens
POOL_TOKENS = 32768


class Session:
    """One model with a device pool in front of a store. Serves one request at a time; threads wait.

    ``exact``: answers are bit-identical with and without a hit (ARCHITECTURE.md says how): hits and
    stored blocks end at multiples of ``prefill_chunk``, and blocks are shared only with
    sessions of equal numerics. ``store`` may be None: then the pool is the only tier.

    Blocks are named by the weights, modules (adapters too) and config that the model has when a
    request comes. So after a change of these nothing of before is hit; docs/python.md says what is not seen.
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
        """Attaches the model. ``revision`` defaults to a fingerprint of all of the weights.

        Raises ``NotMLA`` and ``Unsupported`` for a model that cannot be served right.
        """
        info = attach(model)
        size = info.layout.block_tokens
        if prefill_chunk < size or prefill_chunk % size:
            raise InvalidArgument(f"prefill_chunk={prefill_chunk} is no positive multiple of {size} tokens")
        self._model = model
        self._decoder = decoder_of(model)
        self._info = info
        self._busy = threading.RLock()  # a streamer or a processor may ask in between
        self._block = size
        self._exact = exact
        self._chunk = prefill_chunk
        self._align = prefill_chunk if exact else size  # tokens; hits are rounded down to a multiple
        self._store = store
        self._weights = Weights(model, revision)
        self._base = Namespace(
            layout=info.layout,
            model=model_name or str(model.config.model_type),
            revision=self._weights.name(),
            tenant=tenant,
            rope=info.rope,
            rope_layout=info.rope_layout,
            adapter=adapter,
            salt=salt,
        )
        self._opened: Namespace | None = None
        self._digest: bytes | None = None  # of _opened, once the store has told it
        self._local_key = b""  # in its stead while the store is away
        self._epochs: dict[bytes, int] = {}  # by digest, of what the pool has of it
        self.pool = LatentPool(info.layout, -(-pool_tokens // size), model.device)
        self._loader = PrefixLoader(self.pool, align=self._align, timeout=load_timeout)
        self._queue = StoreQueue(self.pool, store, deadline=store_deadline) if store is not None else None
        if self._queue is not None:
            end_when_dropped(self, partial(self._queue.close, store_deadline))
        self._closed = False
        self._counters: Counter[str] = Counter()

    @property
    def counters(self) -> Counter[str]:
        """Hit and miss tokens, blocks stored and dropped, and each kind of failure of the store."""
        return self._counters + (self._queue.counters() if self._queue is not None else Counter())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, input_ids: Prompt | None = None, **options: Any) -> Generation:
        """Continue a prompt; ``options`` are those of ``model.generate``.

        All of what a tokenizer returns may be passed, as the prompt or as keywords, where its
        mask is all ones. Raises, before anything is computed, ``InvalidTokens`` for a bad
        prompt, ``Unsupported`` for a way of decoding that is not right with a cached prefix or
        for a model that was changed since, and ``PoolFull`` when prompt and answer do not fit
        into the pool.
        """
        with self._busy:
            self._check_model()
            tokens, options = read_prompt(input_ids, options, vocabulary_of(self._model))
            decoding = plan_decoding(
                options,
                self._model.generation_config,
                prompt=len(tokens),
                exact=self._exact,
                positions=positions_of(self._model.config),
            )
            check_room(decoding, len(tokens), self._model.config, self._info.max_tokens, self.pool)
            request = self._open(tokens)
            try:
                prefix = self._prefix(request, decoding)
                cache = LatentCache.from_prefix(self.pool, prefix.blocks, len(prefix.blocks) * self._block)
                with cache, torch.inference_mode(), self._weights.only_watched():
                    self._prefill(request, cache)
                    return self._decode(request, cache, prefix, decoding, options)
            finally:
                if request.job is not None:
                    request.job.finish()

    def prefill(self, input_ids: Prompt | None = None, timeout: float = 60.0, **inputs: Any) -> Prefilled:
        """Have a prompt's whole blocks stored, and answer nothing. Waits for the store, not for its disk.

        What is stored already, unit or not, is loaded and not computed again; of a prompt whose
        unit is there nothing is even loaded, and nothing is done while the store is away. Raises
        what ``generate`` raises; ``inputs`` are what a tokenizer returns besides the ids.
        """
        with self._busy:
            self._check_model()
            tokens, rest = read_prompt(input_ids, inputs, vocabulary_of(self._model))
            if rest:
                raise InvalidArgument(f"prefill takes no {', '.join(rest)}: pass the prompt alone")
            request = self._open(tokens)
            try:
                computed = self._prefill_whole(request)
            finally:
                if request.job is not None:
                    request.job.finish()
            whole = request.stored_until
            if computed is None:  # nothing to do, or no store to do it for
                done = request.match.unit_blocks * self._block >= whole
                return self._prefilled(request, 0, whole if done else 0)
            assert request.job is not None
            return self._prefilled(request, computed, request.job.wait(timeout) * self._block)

    def _prefill_whole(self, request: Request) -> int | None:
        """Compute and queue what is missing of the prompt's whole blocks: tokens computed."""
        whole, match = request.stored_until, request.match
        if match.unit_blocks * self._block >= whole or request.job is None:
            return None
        nothing = Decoding(rows=1, new_tokens=0)
        check_room(nothing, whole, self._model.config, self._info.max_tokens, self.pool)
        request.usable = request.hashes[: whole // self._block]
        stored = min(match.stored_blocks * self._block, whole)
        request.match = replace(match, blocks=(stored - stored % self._align) // self._block)
        prefix = self._prefix(request, nothing)
        start = len(prefix.blocks) * self._block
        cache = LatentCache.from_prefix(self.pool, prefix.blocks, start)
        with cache, torch.inference_mode(), self._weights.only_watched():
            self._prefill(request, cache)
            self._forward(request, cache, cache.tokens, whole)
            self._keep(request, cache, whole)
        return whole - start

    def _prefilled(self, request: Request, computed: int, stored: int) -> Prefilled:
        done = 0 < stored == request.stored_until
        unit = request.hashes[stored // self._block - 1] if done else None
        return Prefilled(len(request.tokens), computed, stored, unit)

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until what was generated since the last call is on disk; False if some of it is not."""
        return self._queue is not None and self._queue.flush(timeout)

    def read_weights_again(self) -> None:
        """Have all weights read before the next request: after writes to few of them through ``.data``."""
        self._weights.read_again()

    def close(self, timeout: float = 60.0) -> None:
        """Store what is queued and end the background thread; from then on nothing is stored.

        The model stays attached.
        """
        if self._queue is not None and not self._closed:
            self._closed = True
            self._queue.close(timeout)

    # --- before the model

    def _check_model(self) -> None:
        check_state(self._decoder)
        check_unmoved(self._model, self.pool.data, exact=self._exact)

    def _open(self, tokens: NDArray[np.uint32]) -> Request:
        digest = self._open_namespace()
        key = digest or self._local_key
        hashes = block_hashes(key, tokens, block_tokens=self._block)
        match = Match(reason=MissReason.UNAVAILABLE)
        if digest is not None:
            match = self._guard("match", lambda: self._match(digest, hashes, len(tokens)), match)
            self._follow(digest, match.epoch)
        whole = len(tokens) - len(tokens) % self._align
        usable = hashes[: (len(tokens) - 1) // self._align * self._align // self._block]
        units = units_by_depth(match.persist_points, whole, self._block)
        request = Request(tokens, hashes, usable, key, match, whole, units)
        if self._queue is not None and not self._closed:
            if match.reason is MissReason.UNAVAILABLE:
                self._counters["store_unavailable"] += 1
                self._queue.note_lost()
            else:
                request.job = self._queue.job(lambda: key, epoch=match.epoch)
        return request

    def _open_namespace(self) -> bytes | None:
        namespace = replace(self._base, revision=self._weights.name())
        if self._exact:  # threads and the like may have been set anew since the last request
            namespace = replace(namespace, numerics=numerics(self._chunk, self._model))
        if namespace != self._opened:
            self._opened, self._digest = namespace, None
            self._local_key = secrets.token_bytes(DIGEST_BYTES)
        if self._digest is None and self._store is not None:
            store = self._store
            self._digest = self._guard("open_namespace", lambda: store.open_namespace(namespace), None)
        return self._digest

    def _match(self, key: bytes, hashes: Sequence[bytes], tokens: int) -> Match:
        assert self._store is not None
        try:
            return self._store.match(key, hashes, tokens, align=self._align, store=not self._closed)
        except NamespaceUnknown:
            self._digest = None  # the data directory is another one: open it with the next request
            raise

    def _follow(self, digest: bytes, epoch: int | None) -> None:
        """What was deleted from the store leaves the pool too, with all else of its namespace."""
        if epoch is not None and epoch != self._epochs.get(digest):
            self._counters["forgotten_blocks"] += self.pool.forget(digest)
            self._epochs[digest] = epoch

    def _prefix(self, request: Request, decoding: Decoding) -> Prefix:
        taken = self._loader.take(request.usable)
        device = Prefix(taken, {Tier.DEVICE: len(taken)})
        try:
            self._make_room(len(request.tokens), len(taken), decoding)
            return self._load(request, device)
        except BaseException:
            self.pool.release(taken)
            raise

    def _make_room(self, prompt: int, taken: int, decoding: Decoding) -> None:
        """Give up queued stores if the pool would not hold this request beside them."""
        if self._queue is not None and self.pool.available < decoding.blocks(prompt, self._block) - taken:
            self._queue.drop()

    def _load(self, request: Request, device: Prefix) -> Prefix:
        store, taken = self._store, device.blocks
        hashes = request.usable[: request.match.blocks]
        if store is None or len(hashes) <= len(taken):
            return device
        prefix = self._guard(
            "load",
            lambda: self._loader.load(store, request.key, hashes, taken, request.match.disk_blocks),
            device,
        )
        if len(prefix.blocks) < len(hashes):
            self._counters["short_loads"] += 1
            return replace(prefix, short=True)
        return prefix

    # --- the model

    def _prefill(self, request: Request, cache: LatentCache) -> None:
        """Forward whole chunks, which end at absolute multiples of the chunk; decoding does the rest."""
        start = cache.tokens
        while (stop := start - start % self._chunk + self._chunk) < len(request.tokens):
            self._forward(request, cache, start, stop)
            self._keep(request, cache, stop)
            start = stop

    def _forward(self, request: Request, cache: LatentCache, start: int, stop: int) -> None:
        if start < stop:
            ids = self._tensor(request.tokens[start:stop])
            self._model.base_model(input_ids=ids, use_cache=True, **{cache_argument(self._model): cache})

    def _decode(
        self,
        request: Request,
        cache: LatentCache,
        prefix: Prefix,
        decoding: Decoding,
        options: dict[str, Any],
    ) -> Generation:
        prompt = self._tensor(request.tokens)
        if decoding.rows > 1:
            cache.batch_repeat_interleave(decoding.rows)
        output = cast(Any, self._model).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **{cache_argument(self._model): cache},
            **options | {"return_dict_in_generate": True},
        )
        sequences: Tensor = output.sequences
        new = sequences[0, prompt.shape[1] :].tolist()
        self._keep(request, cache, len(request.tokens))
        if decoding.rows == 1 and not self._exact:
            self._keep_answer(request, cache, new)
        usage = self._usage(request, prefix, len(new))
        return Generation(new, sequences, usage, output.get("logits"), output.get("scores"))

    def _tensor(self, tokens: NDArray[np.uint32]) -> Tensor:
        return torch.from_numpy(tokens.astype(np.int64))[None].to(self._model.device)

    # --- behind the model

    def _keep(self, request: Request, cache: LatentCache, tokens: int) -> None:
        """``tokens`` tokens are in the pool: make full blocks findable, and queue them for the store."""
        until = min(tokens, request.stored_until) // self._block
        blocks = cache.block_table()[request.queued : until]
        hashes = request.hashes[request.queued : until]
        if not blocks:
            return
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.pool.register(block, block_hash, request.key)
        if request.job is not None:
            request.job.add(hashes, blocks, request.units)
        request.queued = until

    def _keep_answer(self, request: Request, cache: LatentCache, new: list[int]) -> None:
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

    def _usage(self, request: Request, prefix: Prefix, new: int) -> Usage:
        hit = len(prefix.blocks) * self._block
        tiers = {tier: blocks * self._block for tier, blocks in prefix.by_tier.items() if blocks}
        self._counters["hit_tokens"] += hit
        self._counters["miss_tokens"] += len(request.tokens) - hit
        return Usage(
            prompt_tokens=len(request.tokens),
            completion_tokens=new,
            prompt_cache_hit_tokens=hit,
            prompt_cache_miss_tokens=len(request.tokens) - hit,
            hit_tokens_by_tier=tiers,
            miss_reason=MissReason.LOST if prefix.short else request.match.reason,
        )

    def _guard(self, verb: str, work: Callable[[], Result], miss: Result) -> Result:
        """Whatever the store does wrong is a miss and a counter, never an error of the model's path."""

        def failed(kind: str) -> None:
            self._counters[f"{verb}_failed"] += 1

        return or_miss(verb, work, miss, failed)
