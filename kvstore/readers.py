"""Loads of one document by several readers at a time, kept so near each other that the disk is read once.

A reader that is a window ahead of the slowest waits for it; meanwhile what lies between
them is wanted, and so stays in the arena. Nothing is pinned by this and no byte depends on
it: a reader that stands still, or never comes, is left behind, and reads again later.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.api import Readers
from kvstore.errors import InvalidArgument

PATIENCE = 2.0  # seconds that the others wait for a reader that makes no progress
REMEMBERED = 256  # names of groups that have ended
MAX_WINDOW = 256  # blocks; fewer than the second chances that the arena gives to wanted ones


@dataclass(slots=True)
class Counting:
    """How much of one document load is counted already, whichever of its readers brought it. In blocks."""

    reached: int = 0
    missing: int = 0

    def came(self, first: int, reached: int) -> int:
        """Blocks ``[first, reached)`` came to a reader. How many of them are not counted yet."""
        fresh = max(reached - max(first, self.reached), 0)
        self.reached = max(self.reached, reached)
        return fresh

    def fell_short(self, missing: int) -> int:
        """So many blocks did not come to a reader. How many of them are not counted yet."""
        fresh = max(missing - self.missing, 0)
        self.missing = max(self.missing, missing)
        return fresh


class Reader:
    """One load among others of the same document. ``position`` is the next block it will ask for."""

    def __init__(self, group: ReaderGroup, position: int) -> None:
        self._group = group
        self.position = position
        self.moved = time.monotonic()

    def advance(self, position: int) -> None:
        """The reader asked for the blocks before ``position``."""
        self.position = position
        self.moved = time.monotonic()
        self._group.progressed(self)

    @property
    def counting(self) -> Counting:
        """What is counted of the load, by all of its readers."""
        return self._group.counting

    def must_wait(self) -> bool:
        """Whether another one is so far behind that the next block has to wait for it."""
        return self._group.holds_back(self)

    def leave(self) -> None:
        """It asks for no more blocks; a second call does nothing."""
        self._group.remove(self)


class ReaderGroup:
    """The readers of one document load. Those that have not come yet stand at its first block."""

    def __init__(
        self, key: tuple[int, bytes], count: int, first: int, window: int, table: ReaderGroups
    ) -> None:
        self.key = key
        self.count = count
        self.counting = Counting()
        self._absent = count
        self._over = False
        self._first = first
        self._window = window
        self._table = table
        self._born = time.monotonic()
        self._members: set[Reader] = set()
        self._slowest = first
        self._timer: asyncio.TimerHandle | None = None

    def join(self, position: int) -> Reader:
        """One of the readers comes. Nobody waits for one too many, nor for any once the group has ended."""
        reader = Reader(self, position)
        if self._absent and not self._over:
            self._absent -= 1
            self._members.add(reader)
            self._find_slowest()
        return reader

    def remove(self, reader: Reader) -> None:
        """A reader has all that it will have, has died, or was left behind."""
        if reader not in self._members:
            return
        self._members.remove(reader)
        if self._members:
            self._find_slowest()
            return
        if self._timer is not None:
            self._timer.cancel()
        self._over = True
        self._table.forget(self)

    def progressed(self, reader: Reader) -> None:
        """A reader moved, which does not concern the others any more if it was left behind."""
        if reader in self._members:
            self._find_slowest()

    def _find_slowest(self) -> None:
        """Wake those that wait for the slowest, if it is further than it was."""
        positions = [reader.position for reader in self._members]
        slowest = min([*positions, self._first] if self._absent else positions)
        if slowest != self._slowest:
            self._slowest = slowest
            self._table.wake()

    def holds_back(self, reader: Reader) -> bool:
        """Whether a reader must wait; then the patience with the slowest is watched."""
        if reader not in self._members or reader.position - self._slowest < self._window:
            return False
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE / 4, self._watch)
        return True

    def _watch(self) -> None:
        self._timer = None
        patient_until = time.monotonic() - PATIENCE
        limit = max(reader.position for reader in self._members) - self._window
        if self._absent and self._first <= limit and self._born <= patient_until:
            self._leave_behind(self._absent)
            self._absent = 0
        for reader in list(self._members):
            if reader.position <= limit and reader.moved <= patient_until:
                self._leave_behind(1)
                self._members.remove(reader)
        self._find_slowest()
        self._table.wake()  # they wait on, and are watched on, if it was too early

    def _leave_behind(self, count: int) -> None:
        self._table.counters["readers_left_behind"] += count


class ReaderGroups:
    """All groups by namespace and name. Owned by the store's event loop."""

    def __init__(self, window_bytes: int, wake: Callable[[], None], counters: Counter[str]) -> None:
        self._window_bytes = window_bytes
        self._groups: dict[tuple[int, bytes], ReaderGroup] = {}
        # So that whoever comes when the others have ended waits for nobody, and is not counted again.
        self._over: OrderedDict[tuple[int, bytes], ReaderGroup] = OrderedDict()
        self.wake = wake
        self.counters = counters

    def join(self, namespace: int, readers: Readers, first: int, block_bytes: int) -> Reader:
        """A load that will ask for blocks from ``first`` on joins its group, which may have ended.

        Raises ``InvalidArgument`` when the others said another number of readers.
        """
        key = namespace, readers.group
        group = self._groups.get(key) or self._over.get(key)
        if group is None:
            window = min(max(self._window_bytes // block_bytes, 1), MAX_WINDOW)
            group = self._groups[key] = ReaderGroup(key, readers.count, first, window, self)
        if group.count != readers.count:
            raise InvalidArgument(
                f"readers.count={readers.count} in a group of {group.count}: all of them must say the same"
            )
        return group.join(first)

    def forget(self, group: ReaderGroup) -> None:
        """A group without readers has ended."""
        del self._groups[group.key]
        self._over[group.key] = group
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
