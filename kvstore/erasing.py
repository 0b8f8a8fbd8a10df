"""Deletion by an operator: units and namespaces leave HOST and DISK, and do not come back.

First the namespace's epoch moves, on disk and then here: what workers made before is refused,
their leases end, and what they keep they drop with their next Match. Then the blocks go.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.disk import DiskTier
from kvstore.epochs import erasing_note
from kvstore.errors import DiskError, UnitPinned
from kvstore.expiry import STEP_BLOCKS
from kvstore.host import HostTier
from kvstore.leases import Lease, LeaseTable
from kvstore.observer import Departure
from kvstore.pins import Pins
from kvstore.prefix_index import NONE, BlockState, PrefixIndex, view
from kvstore.spaces import Space, SpaceTable
from kvstore.writeback import Writer


class Eraser:
    """Deletes for good. Owned by the store's event loop; a deletion has ended when its call returns."""

    def __init__(
        self,
        index: PrefixIndex,
        spaces: SpaceTable,
        leases: LeaseTable,
        host: HostTier,
        disk: DiskTier,
        writer: Writer,
        pins: Pins,
        counters: Counter[str],
        end_lease: Callable[[Lease], None],
    ) -> None:
        self._index = index
        self._spaces = spaces
        self._leases = leases
        self._host = host
        self._disk = disk
        self._writer = writer
        self._pins = pins
        self._counters = counters
        self._end_lease = end_lease
        self._one = asyncio.Lock()  # a second erasure of a namespace would go on when the first has ended

    async def namespace(self, space: Space) -> int:
        """Delete all of a namespace; how many blocks. Its record stays, for it carries the epoch.

        Raises ``DiskError`` when the deletion cannot be written down; then nothing was deleted.
        """
        with self._spaces.busy(space):
            async with self._one:
                return await self._namespace(space)

    async def _namespace(self, space: Space) -> int:
        epochs, note = self._spaces.epochs, erasing_note(space.id)
        epoch, notes = epochs.next(space.id)
        async with self._pins.changing:  # one that is made meanwhile must not be noted and forgotten
            await self._writer.record(self._disk.note, {**notes, note: b""}, self._pins.keys_of(space.id))
            epochs.move(space.id, epoch)
            epochs.erasing.add(space.id)
            self._pins.drop(space.id)
        self._end_leases(space)
        dropped = 0
        try:
            while rows := self._rows_of(space):
                if all(map(self._writer.carries, rows)):
                    await self._writer.batch_ended()
                for start in range(0, len(rows), STEP_BLOCKS):
                    dropped += self._drop_some(space, rows[start : start + STEP_BLOCKS])
                    await self._writer.gone()
                    await asyncio.sleep(0)
        finally:
            epochs.erasing.discard(space.id)
        with contextlib.suppress(DiskError):  # then the next start erases once more
            await self._writer.record(self._disk.note, {}, (note,))
        return dropped

    def _drop_some(self, space: Space, rows: Sequence[int]) -> int:
        """Drop those rows that are still of this namespace and are not being written; how many."""
        index = self._index
        rows = [
            row
            for row in rows
            if index.namespace[row] == space.id
            and index.state[row] == BlockState.PRESENT
            and not self._writer.carries(row)
        ]
        for row in rows:
            self._drop(row)
        return len(rows)

    def _rows_of(self, space: Space) -> list[int]:
        index = self._index
        rows = np.flatnonzero((view(index.namespace) == space.id) & (view(index.state) == BlockState.PRESENT))
        found: list[int] = rows[np.argsort(-view(index.depth)[rows], kind="stable")].tolist()
        return found

    async def unit(self, space: Space, row: int) -> int:
        """Delete the unit that ends at ``row``, and its blocks that nothing else needs; how many.

        Raises ``UnitPinned``, and ``DiskError`` as ``namespace`` does.
        """
        with self._spaces.busy(space):
            return await self._unit(space, row)

    async def _unit(self, space: Space, row: int) -> int:
        self._require_unpinned(row)
        epoch, notes = self._spaces.epochs.next(space.id)
        block = self._index.hashes[row]
        await self._writer.record(self._disk.note, notes, ())
        self._spaces.epochs.move(space.id, epoch)
        self._end_leases(space)
        # A row that is being written must not be named behind our back.
        while (row := self._index.find(block)) != NONE and self._being_written(row):
            await self._writer.batch_ended()
        if row == NONE or not self._index.kinds[row]:
            return 0
        self._require_unpinned(row)  # it may have been pinned meanwhile
        tail = self._tail(row)
        if not tail:
            self._writer.unmark(row)
        for each in tail:
            self._drop(each)
        await self._writer.gone()
        return len(tail)

    def _require_unpinned(self, row: int) -> None:
        if pins := self._pins.of(row):
            handles = ", ".join(pin.handle for pin in pins)
            raise UnitPinned(
                f"unit {self._index.hashes[row][:6].hex()} is pinned ({handles}); unpin it first"
            )

    def _being_written(self, row: int) -> bool:
        return any(map(self._writer.carries, (row, *self._tail(row))))

    def _tail(self, row: int) -> list[int]:
        """The unit's last block and those above it up to another unit or fork; none if others stand on it."""
        index = self._index
        tail: list[int] = []
        while row != NONE and index.state[row] == BlockState.PRESENT:
            if index.children[row] > bool(tail) or (tail and index.kinds[row]) or self._pins.keeps(row):
                break
            tail.append(row)
            row = index.parent[row]
        return tail

    def _drop(self, row: int) -> None:
        self._counters["deleted_blocks"] += 1
        self._host.forsake(row)
        self._writer.free(row, Departure.DELETED)

    def _end_leases(self, space: Space) -> None:
        for lease in self._leases:
            if lease.namespace == space.id:
                self._end_lease(lease)
