"""The background queue that stores blocks as chunks finish. The model's path never waits for it.

Blocks stay referenced in the pool until they are stored or given up. Each request has a
``StoreJob``, one lease in the store, and hands over its blocks in the order of the chain.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.api import KVStore, ReserveState
from kvstore.errors import KVStoreError
from kvstore.hashing import ROOT
from kvstore.units import UnitKind, UnitMark
from mla.pool import LatentPool

log = logging.getLogger(__name__)

RESERVE_BLOCKS = 32  # blocks of one Reserve, and so of one Commit
RETRY_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class _Blocks:
    hashes: list[bytes]
    blocks: list[int]  # pool blocks, one reference each
    units: dict[int, UnitKind]  # depth in the chain -> kinds


class StoreJob:
    """The blocks of one request on their way to the store.

    ``add`` and ``finish`` are called by the session, the rest belongs to the queue's thread.
    """

    def __init__(self, owner: StoreQueue, namespace: bytes) -> None:
        self.namespace = namespace
        self._owner = owner
        self.lease = 0
        self.parent = ROOT
        self.depth = 0  # blocks of the chain that are dealt with
        self.failed = False
        self.ticket: int | None = None

    def add(self, hashes: Sequence[bytes], blocks: Sequence[int], units: dict[int, UnitKind]) -> None:
        """Queue the next blocks of the chain; ``units`` maps depths in the chain to kinds.

        Takes a reference of its own to each pool block.
        """
        self._owner.put(self, _Blocks(list(hashes), list(blocks), dict(units)))

    def finish(self) -> None:
        """No more blocks come."""
        self._owner.put(self, None)


class StoreQueue:
    """One thread that moves queued pool blocks into the store.

    ``counters``: blocks stored, blocks dropped, jobs failed by kind of failure.
    """

    def __init__(self, pool: LatentPool, store: KVStore, *, deadline: float) -> None:
        self._pool = pool
        self._store = store
        self._deadline = deadline  # seconds that one piece may wait for room
        self._items: queue.SimpleQueue[tuple[StoreJob, _Blocks | None] | None] = queue.SimpleQueue()
        self._lock = threading.Condition()
        self._open = 0  # items queued or at work; under _lock
        self._dropping = False  # give up what is queued; under _lock
        self._tickets: list[int] = []  # not asked for durability yet; under _lock
        self.counters: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="latentkv-store", daemon=True)
        self._thread.start()

    def job(self, namespace: bytes) -> StoreJob:
        """A job for one request."""
        return StoreJob(self, namespace)

    def put(self, job: StoreJob, piece: _Blocks | None) -> None:
        """Queue a piece of a job; None is its end."""
        if piece is not None:
            self._pool.retain(piece.blocks)
        with self._lock:
            self._open += 1
        self._items.put((job, piece))

    def flush(self, timeout: float, *, durable: bool = True) -> bool:
        """Wait until what is queued is stored and, if asked, on disk; False if some of it is not."""
        end = time.monotonic() + timeout
        with self._lock:
            if not self._lock.wait_for(lambda: self._open == 0, timeout):
                return False
            tickets, self._tickets = self._tickets, []
        if not durable:
            return True
        try:
            # All are asked, so that none is left waiting behind one that failed.
            sure = [self._store.durable(ticket, timeout=_left(end)) for ticket in tickets]
            return all(sure)
        except KVStoreError as error:
            log.warning("event=not_durable reason=%s", error)
            return False

    def drop(self, timeout: float) -> None:
        """Give up what is queued, for its pool blocks are needed; waits for the piece at work."""
        with self._lock:
            self._dropping = True
            self._lock.wait_for(lambda: self._open == 0, timeout)
            self._dropping = False

    def close(self, timeout: float) -> None:
        """Store what is queued, at most for ``timeout`` seconds, and end the thread."""
        self.flush(timeout, durable=False)
        self.drop(timeout)
        self._items.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            job, piece = item
            try:
                self._work(job, piece)
            except KVStoreError as error:
                self._fail(job, type(error).__name__, error)
            except Exception as error:  # noqa: BLE001 - a defect of the store must not end the queue
                self._fail(job, "unexpected", error)
            finally:
                if piece is not None:
                    self._pool.release(piece.blocks)
                with self._lock:
                    self._open -= 1
                    self._lock.notify_all()

    def _fail(self, job: StoreJob, kind: str, error: Exception) -> None:
        job.failed = True
        self.counters[f"failed_{kind}"] += 1
        log.warning("event=store_dropped kind=%s depth=%d reason=%s", kind, job.depth, error)

    def _work(self, job: StoreJob, piece: _Blocks | None) -> None:
        if piece is None:
            self._end(job)
            return
        give_up = time.monotonic() + self._deadline
        done = 0
        while done < len(piece.hashes) and not job.failed:
            if self._dropping or time.monotonic() > give_up:
                job.failed = True
                self.counters["failed_deadline"] += 1
                break
            moved = self._store_some(job, piece, done)
            done += moved
            if not moved:
                time.sleep(RETRY_SECONDS)
        self.counters["dropped_blocks"] += len(piece.hashes) - done

    def _store_some(self, job: StoreJob, piece: _Blocks, done: int) -> int:
        """Reserve, fill and commit the next few blocks; how many the chain went on by."""
        hashes = piece.hashes[done : done + RESERVE_BLOCKS]
        answer = self._store.reserve(job.namespace, job.parent, hashes, lease=job.lease)
        job.lease = answer.lease
        filled: list[bytes] = []
        moved = len(hashes) - answer.retry
        for at, block in enumerate(answer.blocks[:moved]):
            if block.state is ReserveState.FILL and block.data is not None:
                self._pool.read_block(piece.blocks[done + at], block.data)
                filled.append(block.hash)
        marks = [
            UnitMark(hashes[depth - job.depth - 1], kinds)
            for depth, kinds in piece.units.items()
            if job.depth < depth <= job.depth + moved
        ]
        if filled or marks:
            job.ticket = self._store.commit(job.lease, filled, marks)
            with self._lock:
                self._tickets.append(job.ticket)
        if moved:
            job.parent = hashes[moved - 1]
            job.depth += moved
        self.counters["stored_blocks"] += len(filled)
        return moved

    def _end(self, job: StoreJob) -> None:
        if job.lease:
            self._store.release(job.lease)


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)
