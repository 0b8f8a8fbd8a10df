"""The connector in a vLLM worker: copies between the daemon's arena and the rank's paged cache.

Loads run on threads, stores in the background queue; each step reports what has ended.
All ranks hold the same latents: all load, the first stores.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from kvstore.api import KVStore
from mla.adapters.chains import Namespaces
from mla.adapters.paged import PagedCache, Place
from mla.adapters.vllm_orders import LoadOrder, SaveOrder, StepOrders
from mla.guard import or_miss
from mla.prefix import check_order
from mla.storing import StoreJob, StoreQueue

LOAD_THREADS = 4


@dataclass(frozen=True)
class LoadResults:
    """What ended since the last step: requests, those that got less than asked for, and the pages."""

    requests: set[str] = field(default_factory=set)
    failed_requests: set[str] = field(default_factory=set)
    failed_pages: set[int] = field(default_factory=set)


class WorkerSide:
    """Copies. vLLM calls it from one thread."""

    def __init__(
        self, store: KVStore, cache: PagedCache, *, load_timeout: float, store_deadline: float, writes: bool
    ) -> None:
        """``writes``: whether this rank stores."""
        self._store = store
        self._cache = cache
        self._timeout = load_timeout
        self._deadline = store_deadline
        self._namespaces = Namespaces(store)
        self._queue: StoreQueue[Place] | None = (
            StoreQueue(cache, store, deadline=store_deadline) if writes else None
        )
        # Of requests with something to store; None on a rank that doesn't.
        self._jobs: dict[str, StoreJob[Place] | None] = {}
        self._ending: dict[str, StoreJob[Place] | None] = {}  # finished, but not stored yet
        self._told: dict[str, int] = {}  # blocks of the chain of these
        self._depths: dict[str, int] = {}  # not told yet
        self._threads = ThreadPoolExecutor(LOAD_THREADS, "latentkv-load")
        self._lock = threading.Lock()  # over what follows, never held across I/O
        self._cancelled: set[str] = set()
        self._loading: set[str] = set()
        self._results = LoadResults()
        self._counters: Counter[str] = Counter()

    def counters(self) -> Counter[str]:
        """Blocks loaded, failed, stored and dropped, and failures of the store by kind."""
        with self._lock:
            loaded = self._counters.copy()
        return loaded + (self._queue.counters() if self._queue is not None else Counter())

    # --- a step

    def drop(self, orders: StepOrders) -> None:
        """Before their blocks are written again: end the loads and stores of these requests."""
        with self._lock:
            self._cancelled |= orders.dropped & self._loading
        for name in orders.dropped:
            job = self._jobs.pop(name, None)
            self._told.pop(name, None)
            if job is not None:
                job.drop()
                job.finish()

    def load(self, orders: StepOrders) -> None:
        """Start the loads of a step."""
        if orders.loads:
            self._cache.fence()
        for order in orders.loads:
            with self._lock:
                self._loading.add(order.request)
            self._threads.submit(self._run_load, order)

    def save(self, orders: StepOrders) -> None:
        """Queue the stores of a step, whose blocks are in the cache or enqueued to be."""
        if orders.saves:
            self._cache.fence()
        for order in orders.saves:
            self._queue_save(order)

    def finished_saves(self, finished: set[str]) -> set[str]:
        """Requests of which nothing is left to store, out of ``finished`` ones of this and earlier steps."""
        for name in finished & self._jobs.keys():
            job = self._ending[name] = self._jobs.pop(name)
            if job is not None:
                job.finish()
        over = {name for name, job in self._ending.items() if job is None or job.over}
        self._note_depths()
        for name in over:
            del self._ending[name]
            self._told.pop(name, None)
        return over

    def finished_loads(self) -> LoadResults:
        """What was loaded, or failed to be, since the last call."""
        with self._lock:
            results, self._results = self._results, LoadResults()
        return results

    def stored_depths(self) -> dict[str, int]:
        """Requests of whose chain more is stored than was told before."""
        self._note_depths()
        depths, self._depths = self._depths, {}
        return depths

    def _note_depths(self) -> None:
        for name, job in (self._jobs | self._ending).items():
            if job is not None and job.depth > self._told.get(name, 0):
                self._depths[name] = self._told[name] = job.depth

    def close(self) -> None:
        """Store what is queued within the deadline, and end the threads and the connection."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._queue is not None:
            self._queue.close(self._deadline)
        self._store.close()

    # --- stores

    def _queue_save(self, order: SaveOrder) -> None:
        if self._queue is None:
            self._jobs[order.request] = None
            return
        job = self._jobs.get(order.request)
        if job is None:
            namer = partial(self._namespaces.require, order.chain)
            job = self._jobs[order.request] = self._queue.job(
                namer, order.parent, order.depth, epoch=order.chain.epoch
            )
            self._told[order.request] = order.depth
        job.add(order.hashes, order.places, dict(order.units))

    # --- loads, on threads

    def _run_load(self, order: LoadOrder) -> None:
        loaded = or_miss(
            "load", lambda: self._fill(order), 0, lambda kind: self._count(f"load_failed_{kind}")
        )
        missing = [page for place in order.places[loaded:] for page in place if page >= 0]
        with self._lock:
            cancelled = order.request in self._cancelled
            self._cancelled.discard(order.request)
            self._loading.discard(order.request)
            self._counters["loaded_blocks"] += loaded
            self._results.requests.add(order.request)
            if missing and not cancelled:
                self._counters["short_loads"] += 1
                self._results.failed_requests.add(order.request)
                self._results.failed_pages.update(missing)

    def _fill(self, order: LoadOrder) -> int:
        key = self._namespaces.require(order.chain)
        loaded = 0
        with self._store.load(
            key, order.hashes, first=order.first, timeout=self._timeout, readers=order.readers
        ) as load:
            for batch in load:
                if self._is_cancelled(order.request):
                    break
                check_order(batch, order.first + loaded)
                places = order.places[loaded : loaded + len(batch)]
                self._cache.write_blocks(places, [block.data for block in batch])
                loaded += len(batch)
        return loaded

    def _is_cancelled(self, request: str) -> bool:
        with self._lock:
            return request in self._cancelled

    def _count(self, name: str) -> None:
        with self._lock:
            self._counters[name] += 1
