"""The arena's extents: equal pieces, each cut for one class of slots or belonging to nobody."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Extent:
    """A piece of the arena. Its class keeps the counts of its slots."""

    start: int  # first page
    pages: int
    cls: int = -1  # -1: belongs to nobody
    cut: int = 0  # slots handed out at least once; those behind are not cut yet
    returned: list[int] = field(default_factory=list)  # cut and FREE again
    used: int = 0  # slots that are not FREE
    clean: int = 0  # of these, CLEAN and not held
    dirty: int = 0  # of these, DIRTY and not held
    stamp: int = 0  # last use of any of its slots

    def evictable(self, dirty: bool) -> bool:
        """Whether all its used slots may be evicted, the DIRTY too if ``dirty``."""
        return self.used == self.clean + (self.dirty if dirty else 0)


class ExtentTable:
    """Which class has which extent, and when it was used. An extent is in exactly one of the two orders."""

    def __init__(self, pages: int, extent_pages: int) -> None:
        self._all = [
            Extent(start, min(extent_pages, pages - start)) for start in range(0, pages, extent_pages)
        ]
        self._unowned = dict.fromkeys(self._all)
        # Extents with an owner, least recently used first: where other classes look for room.
        self._recent: OrderedDict[int, Extent] = OrderedDict()

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._all)

    @property
    def largest(self) -> int:
        """Pages of the largest extent."""
        return max(extent.pages for extent in self._all)

    @property
    def owned(self) -> Collection[Extent]:
        """Those that belong to a class."""
        return self._recent.values()

    def adopt(self, cls: int, slot_pages: int) -> Extent | None:
        """Give an extent without owner to the class, if one is large enough for a slot."""
        extent = next((e for e in self._unowned if e.pages >= slot_pages), None)
        if extent is not None:
            del self._unowned[extent]
            extent.cls = cls
            self._recent[extent.start] = extent
        return extent

    def release(self, extent: Extent) -> None:
        """An extent without a used slot belongs to nobody, so any class may have it next."""
        del self._recent[extent.start]
        extent.cls, extent.cut = -1, 0
        extent.returned.clear()
        self._unowned[extent] = None

    def use(self, extent: Extent, stamp: int) -> None:
        """Make it the most recently used."""
        extent.stamp = stamp
        self._recent.move_to_end(extent.start)

    def reclaimable(self, cls: int, slot_pages: int, before: int, *, dirty: bool) -> Extent | None:
        """The least recently used extent of another class that can be emptied, if used ``before``."""
        for extent in self._recent.values():
            if extent.stamp >= before:
                return None
            if extent.cls != cls and extent.evictable(dirty) and extent.pages >= slot_pages:
                return extent
        return None

    def check(self) -> list[str]:
        """Every broken invariant, in words; empty when sound."""
        problems = []
        if [e.stamp for e in self.owned] != sorted(e.stamp for e in self._all if e.cls >= 0):
            problems.append("extents are out of order of use")
        if set(self._unowned) != {extent for extent in self._all if extent.cls < 0}:
            problems.append("an extent has a class and no owner, or none and an owner")
        return problems
