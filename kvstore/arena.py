"""The HOST tier's memory: one sealed ``memfd``, cut into extents and these into equal slots.

All metadata belongs to one event loop, so there are no locks; threads and workers only
touch the bytes of slots that are held for them.

A slot id is the number of the slot's first 4 KiB page in the arena: unique over all
classes, and where the bytes lie. A slot is FREE unless it has an entry here:

    take -> FILLING -> seal -> DIRTY -> clean -> CLEAN        clean also straight from FILLING
    loosen: DIRTY -> LOOSE        tighten: LOOSE -> DIRTY
    abandon: FILLING -> FREE      disown: any -> FREE         both ORPHAN while held, FREE at the last unhold

Held, FILLING and ORPHAN slots are never evicted or given out again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from kvstore.errors import CapacityTooSmall, InvalidArgument
from kvstore.extents import Extent, ExtentTable
from kvstore.memory import allocate_shared, lock_in_memory, require_available
from kvstore.payloads.direct import PAGE_BYTES, Run
from kvstore.slots import NO_OWNER, READABLE, Slot, SlotClass, SlotState, Taken

DEFAULT_EXTENT_BYTES = 64 << 20
SECOND_CHANCES = 512  # given for one slot, so that a full arena of wanted blocks costs no more


def _nobody(owner: int) -> bool:
    return False


class Arena:
    """Shared memory of ``nbytes`` bytes (rounded down to 4 KiB), faulted in and sealed against resizing.

    The memory comes with ``back``, before anything touches a slot; ``ArenaUnavailable`` when there is not
    so much of it. ``pinned`` says whether it is locked in memory. Misuse of a slot, such as sealing one
    that is not FILLING, raises ``InvalidArgument`` and changes nothing.
    """

    def __init__(self, nbytes: int, extent_bytes: int = DEFAULT_EXTENT_BYTES, *, lead: int = 0) -> None:
        self.nbytes = nbytes - nbytes % PAGE_BYTES
        self.lead = lead  # bytes before the block in its slot
        extent_pages = extent_bytes // PAGE_BYTES
        if self.nbytes <= 0 or extent_pages <= 0:
            raise CapacityTooSmall(f"arena of {nbytes} bytes: give it {PAGE_BYTES} host bytes or more")
        require_available(self.nbytes)  # before tables are made that would take as long as they are large
        self.fd = -1
        self.pinned = False
        self.memory = memoryview(b"")  # all of it, writable
        self._map: mmap.mmap | None = None
        self._extents = ExtentTable(self.nbytes // PAGE_BYTES, extent_pages)
        self._classes: list[SlotClass] = []
        self._slots: dict[int, Slot] = {}
        self._counts: Counter[SlotState] = Counter()  # FREE is not kept here
        self._used_pages = 0
        self._clock = 0

    def back(self, numa_node: int | None = None) -> None:
        """Get the memory, in this thread; a GiB takes up to a second.

        Raises ``ArenaUnavailable`` when it cannot be had now (never SIGBUS later), and
        ``InvalidArgument`` for a NUMA node that the machine does not have.
        """
        self.fd, self._map = allocate_shared(self.nbytes, numa_node)
        self.pinned = lock_in_memory(self._map)
        self.memory = memoryview(self._map)

    def register(self, nbytes_block: int) -> int:
        """Class id for blocks of ``nbytes_block`` bytes; the same size has the same class.

        Raises ``CapacityTooSmall`` when no extent holds one slot of it.
        """
        for number, known in enumerate(self._classes):
            if known.nbytes == nbytes_block:
                return number
        if nbytes_block <= 0:
            raise InvalidArgument(f"a block of {nbytes_block} bytes; it needs at least one")
        made = SlotClass(nbytes_block, -(-(self.lead + nbytes_block) // PAGE_BYTES))
        largest = self._extents.largest
        if made.pages > largest:
            raise CapacityTooSmall(
                f"a block of {nbytes_block} bytes does not fit into the host arena ({self.nbytes} bytes,"
                f" extents of {largest * PAGE_BYTES}); give it more host bytes"
            )
        for number, known in enumerate(self._classes):
            if not known.nbytes:
                self._classes[number] = made
                return number
        self._classes.append(made)
        return len(self._classes) - 1

    def forget(self, nbytes_block: int) -> bool:
        """Nobody has blocks of this size any more, so its id may mean another. False if a slot is in use."""
        found = [cls for cls, known in enumerate(self._classes) if known.nbytes == nbytes_block]
        if any(extent.cls in found for extent in self._extents.owned):
            return False
        for cls in found:
            self._classes[cls] = SlotClass(0, 1)
        return True

    def capacity(self, cls: int) -> int:
        """Slots that this class would have with the whole arena."""
        return sum(extent.pages // self._classes[cls].pages for extent in self._extents)

    def take(
        self, cls: int, owner: int, *, dirty: bool = False, wanted: Callable[[int], bool] = _nobody
    ) -> Taken | None:
        """A slot for ``owner`` (0 or more), FILLING and held once; None when all is in use.

        Looks in this order: a FREE slot of the class; an extent without owner; the least
        recently used of the class's own CLEAN unheld slots and the other classes' extents
        in which nothing but such slots is used. ``dirty`` (HOST_ONLY mode) lets DIRTY
        unheld slots go too, when nothing else is left. Slots whose owner is ``wanted`` soon
        get a second chance: they become recent instead.
        """
        if owner < 0:
            raise InvalidArgument(f"owner={owner} is negative; it must be a block's row")
        evicted = self._make_room(cls, dirty=False, wanted=wanted)
        if evicted is None and dirty:
            evicted = self._make_room(cls, dirty=True, wanted=wanted)
        if evicted is None:
            return None
        if not self._classes[cls].open:  # what was evicted left its extent without owner
            self._adopt(cls)
        return Taken(self._hand_out(cls, owner), evicted)

    def _make_room(self, cls: int, *, dirty: bool, wanted: Callable[[int], bool]) -> tuple[int, ...] | None:
        """Owners evicted so that the class has a FREE slot or can adopt; None if none can be."""
        mine = self._classes[cls]
        if mine.open or self._adopt(cls):
            return ()
        order = mine.dirty if dirty else mine.clean
        victim = self._oldest(order, wanted)
        before = order[victim].stamp if victim is not None else self._clock + 1
        extent = self._extents.reclaimable(cls, mine.pages, before, dirty=dirty)
        if extent is not None:
            step = self._classes[extent.cls].pages
            cut = range(extent.start, extent.start + extent.cut * step, step)
            return tuple(self._free(slot) for slot in cut if slot in self._slots)
        return (self._free(victim),) if victim is not None else None

    def _oldest(self, order: OrderedDict[int, Slot], wanted: Callable[[int], bool]) -> int | None:
        """The least recently used slot that is not wanted; the least recent if too many are."""
        for _ in range(min(len(order), SECOND_CHANCES)):
            slot = next(iter(order))
            if not wanted(order[slot].owner):
                break
            self.touch(slot)
        return next(iter(order), None)

    def _adopt(self, cls: int) -> bool:
        """Give an extent without owner to the class, if one is large enough."""
        mine = self._classes[cls]
        extent = self._extents.adopt(cls, mine.pages)
        if extent is None:
            return False
        mine.open[extent.start] = extent
        return True

    def _hand_out(self, cls: int, owner: int) -> int:
        mine = self._classes[cls]
        extent = next(iter(mine.open.values()))
        if not extent.returned:
            extent.returned.append(extent.start + extent.cut * mine.pages)
            extent.cut += 1
        slot = extent.returned.pop()
        extent.used += 1
        if extent.used == extent.pages // mine.pages:
            del mine.open[extent.start]
        made = self._slots[slot] = Slot(extent, owner)
        self._counts[SlotState.FILLING] += 1
        self._used_pages += mine.pages
        self._stamp(made)
        return slot

    def seal(self, slot: int) -> None:
        """The block is written: FILLING -> DIRTY."""
        self._move(slot, self._require(slot, "seal", SlotState.FILLING), SlotState.DIRTY)

    def clean(self, slot: int) -> None:
        """The block is on disk too: FILLING or DIRTY -> CLEAN."""
        self._move(slot, self._require(slot, "clean", SlotState.FILLING, SlotState.DIRTY), SlotState.CLEAN)

    def loosen(self, slot: int) -> None:
        """The block will not go to disk, and may be evicted: DIRTY -> LOOSE."""
        self._move(slot, self._require(slot, "loosen", SlotState.DIRTY), SlotState.LOOSE)

    def tighten(self, slot: int) -> None:
        """The block goes to disk after all: LOOSE -> DIRTY."""
        self._move(slot, self._require(slot, "tighten", SlotState.LOOSE), SlotState.DIRTY)

    def abandon(self, slot: int) -> None:
        """The block will not come: FILLING -> FREE, or ORPHAN while held."""
        self._require(slot, "abandon", SlotState.FILLING)
        self.disown(slot)

    def disown(self, slot: int) -> None:
        """The block is gone: FREE, or ORPHAN until the last ``unhold``."""
        found = self._require(slot, "disown", SlotState.FILLING, *READABLE)
        if found.holders:
            self._move(slot, found, SlotState.ORPHAN)
            found.owner = NO_OWNER
        else:
            self._free(slot)

    def hold(self, slot: int) -> None:
        """Keep the slot from eviction and reuse; counted."""
        found = self._require(slot, "hold", SlotState.FILLING, *READABLE)
        self._leave_order(slot, found)
        found.holders += 1
        self._stamp(found)

    def unhold(self, slot: int) -> None:
        """Undo one ``hold`` or that of ``take``; the last makes the slot evictable, an ORPHAN FREE."""
        found = self._require(slot, "unhold", *SlotState)
        if not found.holders:
            raise InvalidArgument(f"slot {slot} is not held; unhold it once per hold")
        found.holders -= 1
        self._stamp(found)
        if found.holders == 0 and found.state is SlotState.ORPHAN:
            self._free(slot)
        else:
            self._enter_order(slot, found)

    def touch(self, slot: int) -> None:
        """Make it the most recently used."""
        found = self._require(slot, "touch", *SlotState)
        self._leave_order(slot, found)
        self._stamp(found)
        self._enter_order(slot, found)

    def _require(self, slot: int, verb: str, *states: SlotState) -> Slot:
        found = self._slots.get(slot)
        if found is None or found.state not in states:
            raise InvalidArgument(f"cannot {verb} slot {slot}: it is {self.state(slot).name}")
        return found

    def _move(self, slot: int, found: Slot, state: SlotState) -> None:
        self._leave_order(slot, found)
        self._counts[found.state] -= 1
        self._counts[state] += 1
        found.state = state
        self._stamp(found)
        self._enter_order(slot, found)

    def _stamp(self, found: Slot) -> None:
        self._clock = found.stamp = self._clock + 1
        self._extents.use(found.extent, self._clock)

    # A slot is in exactly one of its class's orders if it is not held and CLEAN, LOOSE or DIRTY; the
    # extent counts them, LOOSE as CLEAN. Every change of state or holders happens between leaving and
    # entering.

    def _leave_order(self, slot: int, found: Slot) -> None:
        mine = self._classes[found.extent.cls]
        if mine.clean.pop(slot, None):
            found.extent.clean -= 1
        elif mine.dirty.pop(slot, None):
            found.extent.dirty -= 1

    def _enter_order(self, slot: int, found: Slot) -> None:
        mine = self._classes[found.extent.cls]
        if found.holders == 0 and found.state in (SlotState.CLEAN, SlotState.LOOSE):
            mine.clean[slot] = found
            found.extent.clean += 1
        elif found.holders == 0 and found.state is SlotState.DIRTY:
            mine.dirty[slot] = found
            found.extent.dirty += 1

    def _free(self, slot: int) -> int:
        """Make the slot FREE; returns its owner."""
        found = self._slots[slot]
        self._leave_order(slot, found)
        del self._slots[slot]
        extent, mine = found.extent, self._classes[found.extent.cls]
        self._counts[found.state] -= 1
        self._used_pages -= mine.pages
        extent.used -= 1
        extent.returned.append(slot)
        mine.open[extent.start] = extent
        if extent.used == 0:
            del mine.open[extent.start]
            self._extents.release(extent)
        return found.owner

    def view(self, slot: int) -> memoryview:
        """The slot's bytes, writable, exactly one block long. Valid while the slot is held."""
        found = self._require(slot, "view", *SlotState)
        start = self.offset(slot)
        return self.memory[start : start + self._classes[found.extent.cls].nbytes]

    def run(self, slot: int) -> Run:
        """The slot's whole pages with the block in them, for direct I/O. Valid while the slot is held."""
        found = self._classes[self._require(slot, "run", *SlotState).extent.cls]
        start = slot * PAGE_BYTES
        return Run(self.memory[start : start + found.pages * PAGE_BYTES], self.lead, found.nbytes)

    def offset(self, slot: int) -> int:
        """Bytes from the start of the arena to the slot's block."""
        return slot * PAGE_BYTES + self.lead

    def state(self, slot: int) -> SlotState:
        """FREE for every id that is not in use."""
        found = self._slots.get(slot)
        return found.state if found else SlotState.FREE

    def owner(self, slot: int) -> int:
        """What ``take`` was given; ``NO_OWNER`` for FREE and ORPHAN."""
        found = self._slots.get(slot)
        return found.owner if found else NO_OWNER

    def holders(self, slot: int) -> int:
        """How many holds keep it."""
        found = self._slots.get(slot)
        return found.holders if found else 0

    def held(self) -> int:
        """Number of slots that somebody holds. Walks everything: for tests."""
        return sum(found.holders > 0 for found in self._slots.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that are not FREE, their rounding to 4 KiB included."""
        return self._used_pages * PAGE_BYTES

    def count(self, state: SlotState) -> int:
        """Number of slots in a state; FREE counts those in extents that have a class."""
        if state is SlotState.FREE:
            owned = self._extents.owned
            return sum(e.pages // self._classes[e.cls].pages - e.used for e in owned)
        return self._counts[state]

    def check(self) -> list[str]:
        """Every broken invariant, in words; empty when sound. Walks everything: for tests."""
        slots = self._slots.items()
        problems = [problem for extent in self._extents for problem in self._extent_problems(extent)]
        for order in [order for cls in self._classes for order in (cls.clean, cls.dirty)]:
            stamps = [found.stamp for found in order.values()]
            if stamps != sorted(stamps):
                problems.append(f"slots are out of order of use: {list(order)}")
        orphans = [found for _, found in slots if found.state is SlotState.ORPHAN]
        if any(found.owner != NO_OWNER or not found.holders for found in orphans):
            problems.append("an orphan has an owner or no holder")
        if self._counts != Counter(found.state for _, found in slots):
            problems.append(f"counts by state are {self._counts}")
        if self._used_pages != sum(self._classes[found.extent.cls].pages for _, found in slots):
            problems.append(f"used pages are {self._used_pages}")
        return problems + self._extents.check()

    def _extent_problems(self, extent: Extent) -> Iterator[str]:
        inside = {slot: found for slot, found in self._slots.items() if found.extent is extent}
        if (extent.cls < 0) != (not inside):
            yield f"extent {extent.start} of class {extent.cls} has {len(inside)} used slots"
        if extent.cls < 0:
            return
        mine = self._classes[extent.cls]
        step = mine.pages
        cut = range(extent.start, extent.start + extent.cut * step, step)
        if sorted([*inside, *extent.returned]) != list(cut):
            yield f"extent {extent.start}: used and returned slots are not those cut"
        if (extent.start in mine.open) != (len(inside) < extent.pages // step):
            yield f"extent {extent.start} is wrongly open or not"
        idle = Counter(found.state for found in inside.values() if not found.holders)
        listed = (len(mine.clean.keys() & inside), len(mine.dirty.keys() & inside))
        counted = (extent.clean, extent.dirty)
        if not listed == counted == (idle[SlotState.CLEAN] + idle[SlotState.LOOSE], idle[SlotState.DIRTY]):
            yield f"extent {extent.start} counts {counted} idle slots, lists {listed}"
        if extent.used != len(inside) or extent.cut * step > extent.pages:
            yield f"extent {extent.start} counts {extent.used} used slots of {len(inside)}"

    def close(self) -> None:
        """Give the memory back as soon as no view of it is left; a second call does nothing."""
        self.memory.release()
        with contextlib.suppress(BufferError):  # the last view unmaps it then
            if self._map is not None:
                self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
