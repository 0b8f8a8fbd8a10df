"""Batches on their way to the disk: hashed, made durable, named in the catalogue.

Each stage has threads of its own, so that one batch is hashed while older ones are written and
that before them is named. Two are written at a time, or the disk would rest from the end of one
until the next has begun. What must not overlap never does: the catalogue is touched by one thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar, TypeVarTuple

from kvstore.catalog import UnitRecord
from kvstore.dirty import Lane
from kvstore.disk import DiskTier, Encoded, NewBlock, Stored
from kvstore.errors import DiskError
from kvstore.layout import LatentLayout
from kvstore.leaving import Leaving

Args = TypeVarTuple("Args")
Result = TypeVar("Result")

WRITING = 2  # batches whose payloads are on their way
DEPTH = 2 + WRITING  # batches under way: one that is hashed, those that are written, one that is named


class TakenAlong(DiskError):
    """A batch before this one failed, on whose blocks those of this one may stand."""


@dataclass(eq=False)
class Batch:
    """What one catalogue transaction brings to the disk, and what leaves the disk before it."""

    rows: dict[int, int]  # row -> slot, both held until the batch has ended
    lane: Lane | None  # of all blocks; None if there are none
    blocks: list[NewBlock]  # in the order of rows
    nbytes: int  # of disk that the blocks take at most
    leaving: Leaving = field(default_factory=Leaving)
    before: Batch | None = None  # the batch that must be named first
    beneath: Batch | None = None  # the last one before it of the same lane
    clearing: list[Batch] = field(default_factory=list)  # those that take away what this one stores anew
    written: bool = False  # its payloads are durable
    # What leaves with it and with those before it has left the disk, or could not.
    cleared: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)  # ended, well or not
    failed: bool = False
    stuck: bool = False  # what was to leave has not left
    others: bool = False  # marks of other blocks were with it

    @property
    def hashes(self) -> set[bytes]:
        """Of the blocks."""
        return {block.hash for block in self.blocks}

    @property
    def layout(self) -> LatentLayout | None:
        """Of all blocks; None if there are none."""
        return self.lane.layout if self.lane is not None else None

    @property
    def block_bytes(self) -> int:
        """Bytes of each block; 0 if there are none."""
        return self.layout.block_bytes if self.layout is not None else 0


class Pipeline:
    """Takes batches to the disk in their order. Owned by the store's event loop.

    ``batches`` are those under way, oldest first; only the oldest is ever being named. A batch
    that fails takes those of its layout behind it along: they may stand on its blocks. So a block
    is never in the catalogue before its parent, and what failed can be queued again in its old order.
    """

    def __init__(self, disk: DiskTier, on_written: Callable[[], None]) -> None:
        """``on_written`` is called when a batch's payloads are durable, so the disk has time for the next."""
        self._disk = disk
        self._on_written = on_written
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="latentkv-hash")
        self._payloads = ThreadPoolExecutor(WRITING, thread_name_prefix="latentkv-write")
        self._catalog = ThreadPoolExecutor(1, thread_name_prefix="latentkv-name")
        self.batches: deque[Batch] = deque()

    @property
    def full(self) -> bool:
        """Whether no further batch may be under way."""
        return len(self.batches) >= DEPTH

    @property
    def writing(self) -> bool:
        """Whether a batch has still to pass the payloads' thread."""
        return any(not batch.written for batch in self.batches)

    @property
    def nbytes(self) -> int:
        """Bytes of disk that the blocks under way take at most."""
        return sum(batch.nbytes for batch in self.batches)

    def carried(self) -> list[int]:
        """The rows under way."""
        return [row for batch in self.batches for row in batch.rows]

    def carries(self, row: int) -> bool:
        """Whether this row's block is under way."""
        return any(row in batch.rows for batch in self.batches)

    def enter(self, batch: Batch) -> None:
        """The batch is under way, behind the others, until ``leave``."""
        batch.before = self.batches[-1] if self.batches else None
        same = (each for each in reversed(self.batches) if each.lane is batch.lane and batch.rows)
        batch.beneath = next(same, None)
        batch.clearing = [each for each in self.batches if each.leaving.has_any(batch.hashes)]
        self.batches.append(batch)

    def leave(self, batch: Batch, *, failed: bool) -> None:
        """The batch has ended, all that it changed on the loop included."""
        self.batches.remove(batch)
        batch.before = batch.beneath = None
        batch.clearing = []
        batch.failed = failed
        batch.done.set()

    async def place(self, batch: Batch) -> list[Stored]:
        """Free what leaves and make the batch's payloads durable; then wait until it is the oldest.

        Raises ``DiskError``, also (``TakenAlong``) when one before it failed; its payloads are freed then.
        """
        stored = await self._write(batch)
        batch.written = True
        self._on_written()
        beneath, clearing = batch.beneath, batch.clearing
        if batch.before is not None:
            await batch.before.done.wait()
        # Nor may a record be named that a deletion which is tried again would take away.
        if (beneath is not None and beneath.failed) or any(each.stuck for each in clearing):
            self._disk.forsake(batch.block_bytes, stored)
            raise TakenAlong("a batch before this one could not be written; this one is written again")
        return stored

    async def _write(self, batch: Batch) -> list[Stored]:
        before = batch.before
        # Beside each other, for the catalogue's sync waits behind the writes of the batch before.
        # Both end, whatever becomes of the other: a thread may be reading the slots.
        encoding = asyncio.create_task(self._encode(batch))
        forgetting = asyncio.create_task(self._forget(batch))
        batch.stuck = bool(batch.leaving)
        await asyncio.wait((encoding, forgetting))
        try:
            await forgetting
            await self._free(batch)
            # Room was made with all that leaves, and not only with what leaves with this batch.
            if before is not None:
                await before.cleared.wait()
        finally:
            batch.cleared.set()
        encoded = await encoding
        return await self._in(self._payloads, self._disk.put, batch.block_bytes, encoded)

    async def _encode(self, batch: Batch) -> list[Encoded]:
        if batch.layout is None:
            return []
        return await self._in(self._hashing, self._disk.encode, batch.layout, batch.blocks)

    async def _free(self, batch: Batch) -> None:
        if batch.leaving:
            await self._in(self._payloads, self._disk.free, batch.leaving.freed)
            batch.leaving.settle()
        batch.stuck = False

    async def _forget(self, batch: Batch) -> None:
        if batch.leaving:
            await self._in(self._catalog, self._disk.forget, batch.leaving.freed)

    async def name(self, batch: Batch, stored: Sequence[Stored], units: Sequence[UnitRecord]) -> None:
        """Name what ``place`` made durable, and units, in one transaction. Raises ``DiskError``."""
        await self._in(self._catalog, self._disk.name, batch.block_bytes, batch.blocks, stored, units)

    async def missing(self, block_bytes: int, places: Sequence[int]) -> set[int]:
        """Which of these places hold nothing any more. Raises ``DiskError``."""
        return await self._in(self._payloads, self._disk.missing, block_bytes, places)

    async def record(self, work: Callable[[*Args], Result], *args: *Args) -> Result:
        """Run some work on the catalogue in the one thread that touches it. Raises what it raises."""
        return await self._in(self._catalog, work, *args)

    async def _in(self, thread: ThreadPoolExecutor, work: Callable[[*Args], Result], *args: *Args) -> Result:
        return await asyncio.get_running_loop().run_in_executor(thread, work, *args)

    async def close(self) -> None:
        """End the threads; no batch may be under way."""
        for thread in (self._hashing, self._payloads, self._catalog):
            await asyncio.to_thread(thread.shutdown)
