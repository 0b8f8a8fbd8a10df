"""The connector in vLLM's scheduler process: what is loaded and stored, and when.

Match runs on threads; the scheduler asks again while it is unknown. Its blocks are the
scheduler's: a request that is being stored keeps them until its workers say so.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvstore.api import GROUP_BYTES, Readers
from kvstore.hashing import ROOT
from kvstore.layout import BLOCK_TOKENS
from kvstore.units import UnitKind
from mla.adapters.settings import VllmSettings
from mla.adapters.vllm_lookup import Answer, Lookup, extend_hashes
from mla.adapters.vllm_orders import LoadOrder, SaveOrder, StepOrders, StoredDepths
from mla.adapters.vllm_plan import (
    Feature,
    answer_units,
    external_tokens,
    extra_keys,
    first_failed,
    input_units,
    places,
    savable,
)

log = logging.getLogger(__name__)

PATIENCE = 0.001  # seconds that the scheduler waits for the Match of one request, in all
THREADS = 4


@dataclass(eq=False)
class _Tracked:
    """A request that the scheduler has.

    ``saved`` blocks of its chain are stored or ordered to be. While ``loading``, or once
    ``storing``, its blocks are not ours to give back: workers report the end.
    """

    request: Request
    extra: dict[int, bytes]
    asked: float = 0.0  # when Match was
    answering: Future[Answer] | None = None
    answer: Answer = field(default_factory=Answer)
    admitted: bool = False
    hashes: list[bytes] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    saved: int = 0
    units: dict[int, UnitKind] = field(default_factory=dict)
    loading: bool = False
    storing: bool = False
    announced: int = 0  # blocks told of in events


class SchedulerSide:
    """Decides. Not thread-safe: vLLM calls it from one thread."""

    def __init__(
        self, lookup: Lookup, settings: VllmSettings, page_tokens: int, *, ranks: int, events: bool
    ) -> None:
        """``ranks``: workers on a host, each of which loads what is ordered."""
        self._lookup = lookup
        self._ranks = ranks
        self._settings = settings
        self._page_tokens = page_tokens
        self._with_events = events
        self._events: list[BlockStored] = []
        self._threads = ThreadPoolExecutor(THREADS, "latentkv-match")
        self._requests: dict[str, _Tracked] = {}
        self._ending: dict[str, _Tracked] = {}  # finished, but workers still store of them
        self._orders = StepOrders()

    # --- before a request runs

    def on_new_request(self, request: Request) -> None:
        """Ask at once, so that the answer is there when the request's turn comes."""
        self._ask(self._track(request))

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """See ``get_num_new_matched_tokens``. No side effects but that Match is asked."""
        tracked = self._track(request)
        if tracked.admitted:  # what could be loaded was; a second try would meet the same failure
            return 0, False
        if tracked.answering is None:
            self._ask(tracked)
        assert tracked.answering is not None
        waited = time.monotonic() - tracked.asked
        try:
            tracked.answer = tracked.answering.result(max(PATIENCE - waited, 0.0))
        except NotYet:
            if waited < self._settings.match_timeout:
                return None, False
            tracked.answer = Answer()
        tokens = external_tokens(tracked.answer.match, computed)
        return tokens, tokens > 0

    def allocated(self, request: Request, pages: list[int], external: int) -> None:
        """See ``update_state_after_alloc``: ``external`` tokens are to be loaded behind the computed ones."""
        tracked = self._track(request)
        if tracked.admitted:
            return
        tracked.admitted = True
        answer = tracked.answer
        tracked.hashes = list(answer.hashes)
        tracked.saved = min(answer.match.stored_blocks, len(tracked.hashes))
        tracked.units = input_units(answer.match.persist_points)
        if not external or answer.chain is None:
            return
        blocks = answer.match.blocks
        computed = blocks * BLOCK_TOKENS - external
        first = computed // BLOCK_TOKENS
        tracked.loading, tracked.pages = True, list(pages)
        self._orders.loads.append(
            LoadOrder(
                request.request_id,
                answer.chain,
                tuple(tracked.hashes[:blocks]),
                first,
                places(pages, first, blocks, self._page_tokens, keep=computed),
                Readers(secrets.token_bytes(GROUP_BYTES), self._ranks) if self._ranks > 1 else None,
            )
        )

    def hit_tiers(self, request: Request, external: int) -> dict[str, int]:
        """Tokens of a load by the tier, ``host`` or ``disk``, that has them."""
        match = self._track(request).answer.match
        disk = min(external, match.disk_blocks * BLOCK_TOKENS)
        return {"host": external - disk, "disk": disk}

    def _track(self, request: Request) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            features = [
                Feature(one.identifier, one.mm_position.offset, one.mm_position.length)
                for one in request.mm_features
            ]
            tracked = _Tracked(request, extra_keys(request.cache_salt or "", features))
            self._requests[request.request_id] = tracked
        return tracked

    def _ask(self, tracked: _Tracked) -> None:
        request = tracked.request
        tracked.asked = time.monotonic()
        if request.prompt_embeds is not None or request.num_tokens < BLOCK_TOKENS:
            tracked.answering = Future()
            tracked.answering.set_result(Answer())
            return
        lora = request.lora_request
        adapter = ("", "", 0) if lora is None else (lora.lora_name, lora.lora_path, lora.lora_int_id)
        tracked.answering = self._threads.submit(
            self._lookup.match, request.all_token_ids, request.num_tokens, tracked.extra, adapter
        )

    # --- each step

    def orders(self, step: SchedulerOutput) -> StepOrders:
        """See ``build_connector_meta``: what workers load and store with this step."""
        for name in step.preempted_req_ids or ():
            self._preempted(name)
        for new in step.scheduled_new_reqs:
            self._requests[new.req_id].pages = list(new.block_ids[0])
        cached = step.scheduled_cached_reqs
        for name, pages in zip(cached.req_ids, cached.new_block_ids, strict=True):
            tracked = self._requests[name]
            if name in cached.resumed_req_ids:
                tracked.pages = []
            tracked.pages += pages[0] if pages else ()
        for name, tokens in step.num_scheduled_tokens.items():
            tracked = self._requests[name]
            request = tracked.request
            until = savable(
                request.num_prompt_tokens, request.num_tokens, request.num_computed_tokens + tokens
            )
            self._save(tracked, until, self._units_until(tracked, until))
        orders, self._orders = self._orders, StepOrders()
        return orders

    def _preempted(self, name: str) -> None:
        """Its blocks are free already: nothing of it may be read or written any more."""
        tracked = self._requests[name]
        if tracked.storing:
            self._orders.dropped.add(name)
        fresh = _Tracked(tracked.request, tracked.extra, announced=tracked.announced)
        self._requests[name] = fresh
        self._ask(fresh)

    def _units_until(self, tracked: _Tracked, until: int) -> Mapping[int, UnitKind]:
        request = tracked.request
        interval = tracked.answer.match.interval
        return tracked.units | answer_units(
            request.num_prompt_tokens, until * BLOCK_TOKENS + 1, interval, ended=False
        )

    def _save(self, tracked: _Tracked, until: int, units: Mapping[int, UnitKind]) -> None:
        chain = tracked.answer.chain
        if until <= tracked.saved or chain is None:
            return
        extend_hashes(tracked.hashes, chain.key, tracked.request.all_token_ids, until, tracked.extra)
        first = tracked.saved
        self._orders.saves.append(
            SaveOrder(
                tracked.request.request_id,
                chain,
                tracked.hashes[first - 1] if first else ROOT,
                first,
                tuple(tracked.hashes[first:until]),
                places(tracked.pages, first, until, self._page_tokens),
                {depth: kinds for depth, kinds in units.items() if first < depth <= until},
            )
        )
        tracked.saved, tracked.storing = until, True

    # --- after a step

    def finished(self, request: Request, pages: list[int]) -> bool:
        """See ``request_finished``: whether the blocks are to be kept until workers have stored them."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        if tracked.loading:  # vLLM keeps the blocks until the load has ended, and asks for no more
            self._orders.dropped.add(request.request_id)
            return False
        if request.status is not RequestStatus.FINISHED_ABORTED and tracked.admitted:
            tracked.pages = pages
            cached = min(request.num_computed_tokens, request.num_tokens - 1)
            units = answer_units(
                request.num_prompt_tokens, cached + 1, tracked.answer.match.interval, ended=True
            )
            self._save(tracked, cached // BLOCK_TOKENS, tracked.units | units)
        if tracked.storing:
            self._ending[request.request_id] = tracked
        return tracked.storing

    def update(self, output: KVConnectorOutput) -> None:
        """See ``update_connector_output``: what workers have done."""
        failed = output.invalid_block_ids
        for tracked in self._requests.values() if failed else ():
            block = first_failed(tracked.pages, failed, self._page_tokens) if tracked.loading else None
            if block is not None:
                tracked.saved = min(tracked.saved, block)  # from there on it is computed, and stored anew
        for name in output.finished_recving or ():
            if name in self._requests:
                self._requests[name].loading = False
        meta = output.kv_connector_worker_meta
        if isinstance(meta, StoredDepths):
            for name, depth in meta.depths.items():
                self._announce(name, depth)
        for name in output.finished_sending or ():
            self._ending.pop(name, None)

    def _announce(self, name: str, depth: int) -> None:
        tracked = self._requests.get(name) or self._ending.get(name)
        if tracked is None or depth <= tracked.announced:
            return
        first, tracked.announced = tracked.announced, depth
        lora = tracked.request.lora_request
        self._events.append(
            BlockStored(
                block_hashes=list(tracked.hashes[first:depth]),
                parent_block_hash=tracked.hashes[first - 1] if first else None,
                token_ids=tracked.request.all_token_ids[first * BLOCK_TOKENS : depth * BLOCK_TOKENS],
                block_size=BLOCK_TOKENS,
                lora_id=None if lora is None else lora.lora_int_id,
                medium="STORAGE",
                lora_name=None if lora is None else lora.lora_name,
            )
        )

    def take_events(self) -> Iterator[BlockStored]:
        """Blocks that the store holds since the last call."""
        events, self._events = self._events, []
        yield from events if self._with_events else ()

    def reset(self) -> None:
        """See ``reset_cache``: what was computed before is neither found nor stored any more."""
        self._lookup.reset()
        for tracked in self._requests.values():
            if tracked.admitted:
                tracked.answer = Answer()  # it runs on, partly with what was there before
            else:
                self._ask(tracked)

    def close(self) -> None:
        """End the threads; what they ask is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._lookup.close()
