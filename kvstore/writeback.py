"""Write-behind: sealed blocks and unit marks go to disk in groups, behind the acknowledgement.

What goes is decided on the store's loop; the pipeline's threads take it to the disk. While the
disk fails or has no room the store is HOST_ONLY: blocks may leave the arena unwritten, and the
writer tries again until the disk is back. Whatever cannot be written holds up nothing else: what
can never be is declined and stays in memory only, the rest waits beside what goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

from kvstore.arena import Arena
from kvstore.blame import Blame
from kvstore.choosing import Choice
from kvstore.dirty import DirtyQueue, Lane
from kvstore.disk import DiskTier, Freed, Stored
from kvstore.errors import DiskError
from kvstore.host import HostTier
from kvstore.leaving import Leaving
from kvstore.lull import Lull
from kvstore.marks import UnitMarks, mark_of
from kvstore.observer import Departure
from kvstore.pipeline import Args, Batch, Pipeline, Result
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.room import Room
from kvstore.settings import StoreSettings
from kvstore.spaces import Space, SpaceTable
from kvstore.supervision import Supervisor
from kvstore.suspects import Suspects
from kvstore.tickets import TicketDesk

log = logging.getLogger(__name__)
TASK = "writer"  # its name with the supervisor


class Writer:
    """Moves DIRTY blocks to disk and keeps the disk within its capacity."""

    def __init__(
        self,
        index: PrefixIndex,
        arena: Arena,
        host: HostTier,
        disk: DiskTier,
        spaces: SpaceTable,
        counters: Counter[str],
        settings: StoreSettings,
        supervisor: Supervisor,
    ) -> None:
        self._index = index
        self._arena = arena
        self._host = host
        self._disk = disk
        self._spaces = spaces
        self._counters = counters
        self._supervisor = supervisor
        self._pipeline = Pipeline(disk, self._wake)
        self._lull = Lull(arena.nbytes * 3 // 8, self._wake)
        self._dirty = DirtyQueue(index, spaces)
        self._marks = UnitMarks(index, spaces)
        self._leaving = Leaving()  # gone from the index, not yet from the disk
        lose = partial(self.free, why=Departure.LOST)
        self._suspects = Suspects(index, host, spaces, self._pipeline, counters, lose)
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stop = asyncio.Event()  # end, done or not
        self._carriers: set[asyncio.Task[None]] = set()  # one for each batch under way
        self._ended = asyncio.Event()  # set, and replaced, with the end of each batch
        self.tickets = TicketDesk(lambda namespace: spaces.of(namespace).namespace.tenant)
        self.room = Room(index, disk, spaces, settings, self._evict, host.is_loose)
        self._choice = Choice(index, arena, host, disk, self._dirty, self.room, counters, self.lost)
        queues = self._dirty, self._marks
        self._blame = Blame(*queues, host, self._choice, counters, self.settle_lost, self._wake)
        self.on_left: Callable[[int, Departure], None] = lambda row, why: None  # a block leaves the store

    @property
    def mode(self) -> str:
        """See ``Status.mode``: ``host_only`` while something could not be written when it was last tried."""
        return "host_only" if self._blame.failing else "ok"

    @property
    def dirty_blocks(self) -> int:
        """Blocks that are readable and not on disk yet."""
        return len(self._dirty)

    def start(self) -> None:
        """Begin to write. What is too much goes first."""
        self.room.keep_within()
        self._supervisor.start(TASK, self._run)

    def block(self, row: int) -> None:
        """A block was sealed: write it."""
        self._dirty.add(row)
        self._lull.note()
        self._wake()

    def lost(self, row: int) -> None:
        """A block has left memory unwritten, or will not come."""
        self.settle_lost(row)
        self._dirty.discard(row)

    def hurry(self) -> None:
        """Somebody waits for what is dirty to be on disk."""
        self._lull.hurry()

    def unit(self, row: int) -> None:
        """A unit was marked. A block that is still to be written takes its mark along."""
        if self._index.place[row] != NONE or self._pipeline.carries(row):
            self._marks.make(row)
            self._wake()

    def awaited(self, row: int) -> list[int]:
        """What a ticket for the unit that ends at this row has to wait for."""
        if self._index.place[row] == NONE:
            return [row, mark_of(row)]
        return [mark_of(row)] if self._marks.pending(row) else []

    def unit_used(self, row: int) -> None:
        """A unit was hit; its record follows with the next batch."""
        if self._index.place[row] != NONE:
            self._marks.use(row)

    def keep_uses(self) -> None:
        """Write down which units were used since they were last on disk."""
        if self._marks.hurry_uses():
            self._wake()

    def free(self, row: int, why: Departure) -> None:
        """Drop a block from index and tiers; its place on disk is freed behind."""
        index = self._index
        if index.state[row] == BlockState.PRESENT:
            self.on_left(row, why)
        if index.place[row] != NONE:
            block_bytes = self._space(row).block_bytes
            self._leaving.freed.append(Freed(index.hashes[row], block_bytes, index.place[row]))
            self.room.leave(row)
            self._wake()
        self._marks.drop(row)
        self._host.discard(row)
        index.lose(row)
        self.lost(row)

    def unmark(self, row: int) -> None:
        """No unit ends at this row any more; its record leaves the disk behind."""
        self._leaving.freed.append(Freed(self._index.hashes[row], self._space(row).block_bytes, None))
        self._marks.drop(row)
        self._index.unmark(row)
        self.tickets.settle(mark_of(row), durable=False)
        self._wake()

    def gone(self) -> asyncio.Future[None]:
        """Done once all that was freed so far has left the disk; cancelled if the store closes before."""
        return self._leaving.gone()

    def under_way(self) -> list[Batch]:
        """The batches that are on their way to the disk."""
        return list(self._pipeline.batches)

    def carries(self, row: int) -> bool:
        """Whether this row's block or mark is on its way to the disk right now."""
        return self._pipeline.carries(row) or self._marks.writing(row)

    async def batch_ended(self) -> None:
        """Wait until one of the batches that are under way has ended."""
        if self._pipeline.batches:
            await self._ended.wait()

    def corrupt(self, row: int) -> None:
        """A block on disk did not verify: it leaves, and those that are missing altogether will."""
        self._suspects.add(self._space(row).block_bytes)
        self.free(row, Departure.CORRUPT)
        self._wake()

    def settle_lost(self, row: int) -> None:
        """A block or a mark will not become durable."""
        self.tickets.settle(row, durable=False)
        self.tickets.settle(mark_of(row), durable=False)

    def _space(self, row: int) -> Space:
        return self._spaces.of(self._index.namespace[row])

    def _wake(self) -> None:
        self._idle.clear()
        self._work.set()

    async def record(self, work: Callable[[*Args], Result], *args: *Args) -> Result:
        """Run some work on the catalogue in the one thread that touches it. Raises what it raises."""
        return await self._pipeline.record(work, *args)

    @property
    def _pending(self) -> bool:
        """Whether anything is left to be done."""
        return bool(len(self._dirty) or self._marks or self._leaving or self._suspects)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _lane(self) -> Lane | None:
        """Which blocks should set out now.

        While some are being written only a full batch does: what comes meanwhile makes it larger.
        """
        if self._leaving and self._blame.of_leaving and self._blame.of_leaving.may_try(self._now()):
            return None  # that goes alone, for it may fail again
        writing = self._pipeline.writing
        return self._dirty.ready(self._now(), lambda lane: self._choice.full(lane) if writing else 1)

    @property
    def _errands(self) -> bool:
        """Whether there is a reason to begin a batch though there is no block for it.

        Marks alone are none while one is on its way, for they go along with that.
        """
        now = self._now()
        leaving = self._leaving and self._blame.of_leaving.may_try(now)
        suspects = self._suspects and self._blame.of_looking.may_try(now)
        marks = self._marks and self._blame.of_marks.may_try(now) and not self._pipeline.batches
        return bool(leaving or suspects or marks)

    @property
    def _may_begin(self) -> bool:
        """Whether the next batch should set out now."""
        if self._stop.is_set() or self._pipeline.full or not self._lull.come(self._dirty.nbytes):
            return False
        return self._lane() is not None or (self._errands and not self._pipeline.writing)

    async def _run(self) -> None:
        self._work.set()  # also after a failure
        while not (self._stop.is_set() and not self._pipeline.batches):
            await self._work.wait()
            self._work.clear()
            while self._may_begin and self._begin():
                pass
            if not self._pipeline.batches and not self._pending:
                self._idle.set()

    def _begin(self) -> bool:
        """Send the next batch on its way; False if that has to wait for those under way."""
        self._park()
        lane = self._lane()
        if lane is None:
            self._send(Batch({}, None, [], 0))
            return True
        try:
            batch = self._choice.batch(lane, self._pipeline)
        except Exception as failure:  # a defect below must not end the writing for ever
            log.exception("event=write_failed")
            self._blame.lane_failed(lane, lane.next(self._choice.full(lane)))
            self._blame.show_mode(failure)
            return True
        if batch is not None:
            self._send(batch)
            return True
        return self._find_room(lane)

    def _send(self, batch: Batch) -> None:
        if not self._blame.of_leaving or batch.lane is None:
            batch.leaving = self._leaving.take()
        self._pipeline.enter(batch)
        carrier = asyncio.create_task(self._carry(batch), name="latentkv-batch")
        self._carriers.add(carrier)
        carrier.add_done_callback(self._carriers.discard)
        self._supervisor.watch(carrier)

    def _find_room(self, lane: Lane) -> bool:
        """There is none for the first block of a lane; whether something else can be tried now."""
        if self._pipeline.batches:  # what they bring may be evicted
            return False
        if not self._choice.make_way(lane):
            reason = DiskError(
                f"disk: a block of {lane.layout.block_bytes} bytes does not fit beside"
                f" {self.room.used_bytes} bytes that are held by leases and pins; raise disk_bytes"
            )
            self._blame.lane_failed(lane, ())
            self._blame.show_mode(reason)
        return True

    def _park(self) -> None:
        """What still has to leave the disk cannot: the same blocks must not be written before."""
        for lane in self._dirty.lanes if self._blame.of_leaving else ():
            for row in lane.park(self._leaving.blocks()):
                self.settle_lost(row)

    async def _carry(self, batch: Batch) -> None:
        """Take a batch to the disk. Whatever fails, it ends and what it held is queued again."""
        error: Exception | None = None
        try:
            await self._write(batch)
        except DiskError as failure:
            error = failure
        except Exception as failure:  # a defect below must not end the writing for ever
            log.exception("event=write_failed")
            error = failure
        for slot in batch.rows.values():
            self._arena.unhold(slot)
        if error is None:
            self._succeeded(batch)
        else:
            self._leaving.put_back(batch.leaving)
            if batch.lane is not None:
                self._dirty.put_back(batch.lane, batch.rows)
            self._blame.failed(batch, error)
        self._pipeline.leave(batch, failed=error is not None)
        self._ended.set()
        self._ended = asyncio.Event()
        self._blame.show_mode(error)
        self._host.notify_room()
        self._wake()

    async def _write(self, batch: Batch) -> None:
        await self._look()
        stored = await self._pipeline.place(batch)
        units = self._marks.take(batch.rows, self._marks_limit(batch))
        batch.others = len(units) > sum(unit.hash in batch.hashes for unit in units)
        durable = False
        try:
            await self._pipeline.name(batch, stored, units)
            durable = True
            for (row, slot), at in zip(batch.rows.items(), stored, strict=True):
                self._written(row, slot, at)
        finally:
            for row in self._marks.end(batch.rows, durable=durable):
                self.tickets.settle(mark_of(row), durable=True)
        self._counters["written_blocks"] += len(batch.rows)

    def _marks_limit(self, batch: Batch) -> int | None:
        """How many marks of other blocks go along; None is all. Those that failed go one by one."""
        if not self._blame.of_marks:
            return None
        return 1 if batch.lane is None and self._blame.of_marks.may_try(self._now()) else 0

    async def _look(self) -> None:
        """Look for payloads that are missing, which nothing else waits for."""
        if not self._suspects or not self._blame.of_looking.may_try(self._now()):
            return
        try:
            await self._suspects.look()
        except DiskError as error:
            log.warning("event=payloads_not_listed reason=%s", error)
            self._counters["read_errors"] += 1
            self._blame.pause(self._blame.of_looking)
        except BaseException:  # a defect: the batch fails, and the next one does not come by it
            self._blame.pause(self._blame.of_looking)
            raise
        else:
            self._blame.of_looking.over()

    def _succeeded(self, batch: Batch) -> None:
        if batch.lane is not None:
            self._dirty.done(batch.lane, batch.rows)
        elif self._blame.of_leaving and not self._leaving:
            self._blame.of_leaving.over()
            for lane in self._dirty.lanes:
                lane.unpark()
        self._blame.succeeded(batch, self._disk.batch_blocks(max(batch.block_bytes, 1)))

    def _evict(self, row: int) -> None:
        if self._index.place[row] != NONE:
            self._counters["disk_evicted_blocks"] += 1
        self.free(row, Departure.CAPACITY)

    def _written(self, row: int, slot: int, at: Stored) -> None:
        index = self._index
        self.room.enter(row, at.length)
        index.place[row], index.page[row] = at.place
        index.length[row] = at.length
        index.codec[row], index.checksum[row] = at.codec, at.checksum
        self._arena.clean(slot)
        self.tickets.settle(row, durable=True)

    async def close(self, seconds: float) -> bool:
        """Write what is dirty, at most for ``seconds``; True if all of it is durable."""
        self.keep_uses()
        self._blame.hurry()
        self._lull.close()
        await self._drain(seconds)
        self._stop.set()
        self._wake()
        await self._supervisor.ended(TASK)
        if self._carriers:  # not cancelled: a thread may be reading the slots of a batch
            await asyncio.wait(self._carriers)
        await self._pipeline.close()
        self.tickets.settle_all()
        self._leaving.cancel()
        return not self._pending

    async def _drain(self, seconds: float) -> None:
        """Wait until all is written, the writer was given up, or so many seconds have passed."""
        ends = [asyncio.ensure_future(end) for end in (self._idle.wait(), self._supervisor.ended(TASK))]
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not self._idle.is_set():
            log.error("event=drain_incomplete dirty_blocks=%d", self.dirty_blocks)
        for end in ends:
            end.cancel()
