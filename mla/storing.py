"""The background queue that stores blocks as chunks finish. The model's path never waits for it.

Blocks stay referenced in the pool (ours, or an engine's) until they are stored or given up. Each
request has a ``StoreJob``, one lease in the store, and hands over its blocks in the order of the chain.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Generic, Protocol, TypeVar

from kvstore.api import KVStore, ReservedBlock, ReserveState
from kvstore.errors import LeaseUnknown
from kvstore.forking import Home
from kvstore.hashing import ROOT
from kvstore.units import UnitKind, UnitMark
from mla.streams import Mark

log = logging.getLogger(__name__)
Result = TypeVar("Result")
Block = TypeVar("Block")  # how the pool names a block
BlockIn = TypeVar("BlockIn", contravariant=True)
Namer = Callable[[], bytes]

RESERVE_BLOCKS = 96  # blocks of one Reserve, and so of one Commit; each call costs about half a copied block
COPY_BLOCKS = 8  # blocks that are copied at once; whoever needs the pool blocks waits for so many
RETRY_SECONDS = 0.02
END_SECONDS = 1.0  # for the thread to notice that it is over
MAX_TICKETS = 1 << 16  # as many as a store remembers


class BlockPool(Protocol[BlockIn]):
    """Where the blocks lie that are to be stored. A retained block's bytes don't change."""

    def retain(self, blocks: Sequence[BlockIn]) -> None: ...

    def release(self, blocks: Sequence[BlockIn]) -> None: ...

    def mark(self) -> Mark | None: ...

    def read_blocks(
        self, blocks: Sequence[BlockIn], outs: Sequence[memoryview], after: Mark | None
    ) -> None: ...


class _Piece(Generic[Block]):
    """Consecutive blocks of a chain, queued or at work. Its pool blocks can be taken away at any time."""

    def __init__(
        self,
        job: StoreJob[Block],
        pool: BlockPool[Block],
        hashes: Sequence[bytes],
        blocks: Sequence[Block],
        units: dict[int, UnitKind],
    ) -> None:
        self.job = job
        self.hashes = list(hashes)
        self.units = dict(units)  # depth in the chain -> kinds
        self._pool = pool
        self._lock = threading.Lock()  # held while blocks are copied, never across a call of the store
        self._blocks = list(blocks)  # one pool reference each; empty once given up
        pool.retain(self._blocks)
        self._written = pool.mark()  # by the thread that has filled the blocks

    @property
    def given_up(self) -> bool:
        """Whether the pool blocks were taken away."""
        return not self._blocks

    def copy(self, index: int, outs: Sequence[memoryview]) -> bool:
        """Copy the blocks from ``index`` on to ``outs``; False if the pool blocks were taken away."""
        for at in range(0, len(outs), COPY_BLOCKS):
            part = outs[at : at + COPY_BLOCKS]
            start = index + at
            with self._lock:
                if not self._blocks:
                    return False
                self._pool.read_blocks(self._blocks[start : start + len(part)], part, self._written)
        return True

    def give_up(self) -> None:
        """Give the pool blocks back; waits for the copy of a few at most."""
        with self._lock:
            blocks, self._blocks = self._blocks, []
            self._pool.release(blocks)


class StoreJob(Generic[Block]):
    """The blocks of one request on their way to the store.

    ``add``, ``drop`` and ``finish`` are called by the worker, ``depth`` and ``over`` may be read
    by it; the rest belongs to the queue's thread.
    """

    def __init__(
        self, owner: StoreQueue[Block], namespace: Namer, parent: bytes, depth: int, epoch: int | None
    ) -> None:
        self.namespace = namespace
        self.epoch = epoch
        self._owner = owner
        self.lease = 0
        self.parent = parent
        self.depth = depth  # blocks of the chain that are stored
        self.failed = False
        self.over = False  # finished, and nothing of it is queued or at work

    def add(self, hashes: Sequence[bytes], blocks: Sequence[Block], units: dict[int, UnitKind]) -> None:
        """Queue the next blocks of the chain; ``units`` maps depths in the chain to kinds.

        Takes a reference of its own to each pool block.
        """
        self._owner.put(self, hashes, blocks, units)

    def drop(self) -> None:
        """Give up what is queued or at work: its blocks are not read once this returns."""
        self._owner.drop(self)

    def finish(self) -> None:
        """No more blocks come."""
        self._owner.end(self)

    def wait(self, timeout: float) -> int:
        """Wait until a finished job is over, at most ``timeout`` seconds; blocks of the chain stored."""
        self._owner.wait_over(self, timeout)
        return self.depth


class StoreQueue(Generic[Block]):
    """One thread that moves queued pool blocks into the store.

    In a forked child, which has no such thread, nothing is stored and nothing is waited for.
    """

    def __init__(self, pool: BlockPool[Block], store: KVStore, *, deadline: float) -> None:
        self._home = Home()
        self._pool = pool
        self._store = store
        self._deadline = deadline  # seconds that one piece may wait for room
        self._items: queue.SimpleQueue[tuple[StoreJob[Block], _Piece[Block] | None] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Condition()
        self._open = 0  # items queued or at work; under _lock
        self._pieces: set[_Piece[Block]] = set()  # of these items; under _lock
        self._tickets: list[int] = []  # not asked for durability yet; under _lock
        self._lost = False  # something was not stored since the last flush; under _lock
        self._counters: Counter[str] = Counter()  # under _lock
        self._thread = threading.Thread(target=self._run, name="latentkv-store", daemon=True)
        self._thread.start()

    def counters(self) -> Counter[str]:
        """Blocks stored and dropped, and failures by verb and kind."""
        if not self._home.here:
            return Counter()
        with self._lock:
            return self._counters.copy()

    def job(
        self, namespace: Namer, parent: bytes = ROOT, depth: int = 0, *, epoch: int | None = None
    ) -> StoreJob[Block]:
        """A job for one request, whose first ``depth`` blocks, ``parent`` the last, are stored.

        ``namespace`` gives its digest; it is called on the queue's thread, and may open it.
        ``epoch`` is that of the request's Match: what is deleted meanwhile does not come back.
        """
        return StoreJob(self, namespace, parent, depth, epoch)

    def put(
        self,
        job: StoreJob[Block],
        hashes: Sequence[bytes],
        blocks: Sequence[Block],
        units: dict[int, UnitKind],
    ) -> None:
        """Queue blocks of a job; see ``StoreJob.add``."""
        if not self._home.here:
            job.failed = True
            return
        piece = _Piece(job, self._pool, hashes, blocks, units)
        with self._lock:
            self._open += 1
            self._pieces.add(piece)
        self._items.put((job, piece))

    def end(self, job: StoreJob[Block]) -> None:
        """Queue the end of a job."""
        if not self._home.here:
            job.over = True
            return
        with self._lock:
            self._open += 1
        self._items.put((job, None))

    def wait_over(self, job: StoreJob[Block], timeout: float) -> None:
        """See ``StoreJob.wait``."""
        if not self._home.here:
            return
        with self._lock:
            self._lock.wait_for(lambda: job.over, timeout)

    def note_lost(self) -> None:
        """A request is not stored at all."""
        if not self._home.here:
            return
        with self._lock:
            self._lost = True

    def flush(self, timeout: float) -> bool:
        """Wait until what was queued since the last call is on disk; False if some of it is not."""
        end = time.monotonic() + timeout
        if not self._home.here or not self._wait_empty(timeout):
            return False
        with self._lock:
            tickets, self._tickets = self._tickets, []
            lost, self._lost = self._lost, False
        durable = (self._attempt("durable", partial(self._is_durable, ticket, end)) for ticket in tickets)
        return all(durable) and not lost

    def _is_durable(self, ticket: int, end: float) -> bool:
        return self._store.durable(ticket, timeout=_left(end))

    def _wait_empty(self, timeout: float) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: self._open == 0, timeout)

    def drop(self, job: StoreJob[Block] | None = None) -> None:
        """Give up what is queued or at work (of one job, or all): its pool blocks are needed.

        Waits for no store.
        """
        if not self._home.here:
            return
        with self._lock:
            pieces = [piece for piece in self._pieces if job is None or piece.job is job]
        for piece in pieces:
            piece.give_up()

    def close(self, timeout: float) -> None:
        """Store what is queued, give up what is not stored after ``timeout`` seconds, and end the thread.

        A thread that is inside a call of the store by then ends with that call.
        """
        if not self._home.here:
            return
        if not self._wait_empty(timeout):
            self.drop()
        self._items.put(None)
        self._thread.join(END_SECONDS)

    # --- the thread

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            job, piece = item
            if piece is None:
                self._attempt("release", partial(self._end, job))
                job.over = True
            else:
                self._take(job, piece)
            with self._lock:
                self._open -= 1
                self._lock.notify_all()

    def _attempt(self, verb: str, work: Callable[[], Result]) -> Result | None:
        """The result, or None and a counter: no failure of the store may end the queue, or its caller."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - rule 3: a cache is never in the way
            self._count(f"{verb}_failed_{type(error).__name__}")
            log.warning("event=not_stored verb=%s kind=%s reason=%s", verb, type(error).__name__, error)
            return None

    def _count(self, name: str, times: int = 1) -> None:
        with self._lock:
            self._counters[name] += times

    def _take(self, job: StoreJob[Block], piece: _Piece[Block]) -> None:
        end = job.depth + len(piece.hashes)
        if not job.failed:
            job.failed = not self._attempt("store", partial(self._store_piece, job, piece))
        piece.give_up()
        with self._lock:
            self._pieces.discard(piece)
        if job.failed:
            self._count("dropped_blocks", end - job.depth)
            self.note_lost()

    def _store_piece(self, job: StoreJob[Block], piece: _Piece[Block]) -> bool:
        """Store a piece, however often the store has no room for it; False if it was given up."""
        give_up = time.monotonic() + self._deadline
        first, end = job.depth, job.depth + len(piece.hashes)
        while job.depth < end:
            if piece.given_up:
                self._count("store_dropped")
                return False
            if time.monotonic() > give_up:
                self._count("store_expired")
                return False
            if not self._store_some(job, piece, job.depth - first):
                time.sleep(RETRY_SECONDS)
        return True

    def _store_some(self, job: StoreJob[Block], piece: _Piece[Block], done: int) -> bool:
        """Reserve, fill and commit the next few blocks; False if the chain went on by none."""
        try:
            return self._store_next(job, piece, done)
        except LeaseUnknown:
            # It expired while the model was at work, or ended with its daemon: begin another.
            lease, job.lease = job.lease, 0
            self._store.release(lease)
            return False

    def _store_next(self, job: StoreJob[Block], piece: _Piece[Block], done: int) -> bool:
        hashes = piece.hashes[done : done + RESERVE_BLOCKS]
        answer = self._store.reserve(job.namespace(), job.parent, hashes, lease=job.lease, epoch=job.epoch)
        job.lease = answer.lease
        filled: list[bytes] = []
        for start, datas in _runs(answer.blocks):
            if not piece.copy(done + start, datas):
                return False
            filled.extend(hashes[start : start + len(datas)])
        # A block that another worker is filling ends the way for now: should that worker
        # die, the block is ours to fill, or else no unit behind it would be whole.
        moved = sum(1 for _ in takewhile(_stored, answer.blocks))
        marks = [
            UnitMark(hashes[depth - job.depth - 1], kinds)
            for depth, kinds in piece.units.items()
            if job.depth < depth <= job.depth + moved
        ]
        if filled or marks:
            self._note_ticket(self._store.commit(job.lease, filled, marks))
        self._count("stored_blocks", len(filled))
        if moved:
            job.parent = hashes[moved - 1]
            job.depth += moved
        return moved > 0

    def _note_ticket(self, ticket: int) -> None:
        with self._lock:
            self._tickets.append(ticket)
            if len(self._tickets) > MAX_TICKETS:
                del self._tickets[0]
                self._lost = True

    def _end(self, job: StoreJob[Block]) -> None:
        if job.lease:
            self._store.release(job.lease)


def _stored(block: ReservedBlock) -> bool:
    return block.state is ReserveState.PRESENT or block.data is not None


def _runs(blocks: Sequence[ReservedBlock]) -> Iterator[tuple[int, list[memoryview]]]:
    """Where blocks to be filled follow each other: the first one's index, and their bytes."""
    at = 0
    while at < len(blocks):
        run = []
        for block in blocks[at:]:
            if block.data is None:
                break
            run.append(block.data)
        if run:
            yield at, run
        at += len(run) + 1


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)
