import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.arena import PAGE_BYTES, Arena
from kvstore.errors import ArenaUnavailable, CapacityTooSmall, InvalidArgument
from kvstore.slots import NO_OWNER, SlotState

EXTENT = 4 * PAGE_BYTES


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(4 * EXTENT, EXTENT)
    made.back()
    yield made
    made.close()


def fill(arena: Arena, cls: int, owner: int) -> int:
    """A CLEAN slot that nobody holds."""
    taken = arena.take(cls, owner)
    assert taken is not None
    arena.clean(taken.slot)
    arena.unhold(taken.slot)
    return taken.slot


def test_its_size_is_rounded_down_to_pages_and_the_last_extent_may_be_shorter():
    arena = Arena(5 * PAGE_BYTES + 17, EXTENT)
    arena.back()
    assert arena.nbytes == 5 * PAGE_BYTES == os.fstat(arena.fd).st_size == len(arena.memory)
    assert arena.capacity(arena.register(PAGE_BYTES)) == 5
    assert arena.capacity(arena.register(2 * PAGE_BYTES)) == 2
    arena.close()


def test_the_shared_memory_can_be_neither_shrunk_nor_grown(arena):
    for size in (PAGE_BYTES, arena.nbytes + PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def test_all_its_pages_are_there_from_the_start(arena):
    assert os.fstat(arena.fd).st_blocks * 512 == arena.nbytes


def test_what_is_written_through_a_view_is_seen_through_another_mapping(arena):
    slot = arena.take(arena.register(5000), 1).slot
    arena.view(slot)[:] = b"\x07" * 5000
    with mmap.mmap(arena.fd, arena.nbytes) as other:
        assert other[arena.offset(slot) :][:5000] == b"\x07" * 5000


@pytest.mark.parametrize("nbytes", [0, -1, PAGE_BYTES - 1])
def test_an_arena_below_a_page_is_refused(nbytes):
    with pytest.raises(CapacityTooSmall, match="host bytes"):
        Arena(nbytes)


def test_memory_that_is_not_there_is_refused_at_start():
    with pytest.raises(ArenaUnavailable, match="available"):
        Arena(1 << 50)


def test_a_shortage_of_memory_fails_at_start_and_leaks_no_descriptor():
    # The file size limit makes the allocation itself fail, as a full memory would.
    code = """
import os, resource, signal
from kvstore.arena import Arena
from kvstore.errors import ArenaUnavailable
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
before = os.listdir("/proc/self/fd")
try:
    Arena(2 << 20).back()
except ArenaUnavailable as error:
    assert "2097152" in str(error)
    assert os.listdir("/proc/self/fd") == before
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


def test_a_block_larger_than_an_extent_is_refused_by_its_size(arena):
    with pytest.raises(CapacityTooSmall, match=str(EXTENT + 1)):
        arena.register(EXTENT + 1)


def test_blocks_of_one_size_share_a_class(arena):
    assert arena.register(5000) == arena.register(5000) != arena.register(5001)


def test_a_slot_is_page_aligned_and_its_view_exactly_a_block(arena):
    cls = arena.register(5000)
    slots = [arena.take(cls, i).slot for i in range(arena.capacity(cls))]
    assert all(arena.offset(slot) % PAGE_BYTES == 0 and len(arena.view(slot)) == 5000 for slot in slots)
    assert arena.take(cls, 99) is None
    assert arena.used_bytes == len(slots) * 2 * PAGE_BYTES


def test_extents_without_owner_are_used_before_anything_is_evicted(arena):
    cls = arena.register(EXTENT)
    for owner in range(4):
        taken = arena.take(cls, owner)
        assert taken.evicted == ()
        arena.clean(taken.slot)
        arena.unhold(taken.slot)
    assert arena.take(cls, 4).evicted == (0,)


def test_the_least_recently_used_clean_slot_goes_first(arena):
    cls = arena.register(2 * PAGE_BYTES)
    slots = [fill(arena, cls, owner) for owner in range(8)]
    arena.touch(slots[0])
    arena.hold(slots[1])
    assert arena.take(cls, 9).evicted == (2,)
    arena.unhold(slots[1])
    assert [arena.take(cls, 9).evicted for _ in range(7)] == [(3,), (4,), (5,), (6,), (7,), (0,), (1,)]
    assert arena.check() == []


def test_filling_dirty_and_held_slots_stay(arena):
    cls = arena.register(EXTENT)
    filling, dirty, held, orphan = (arena.take(cls, i).slot for i in range(4))
    arena.unhold(filling)
    arena.seal(dirty)
    arena.unhold(dirty)
    arena.clean(held)
    arena.disown(orphan)
    assert arena.take(cls, 9) is None
    assert (arena.state(orphan), arena.owner(orphan)) == (SlotState.ORPHAN, NO_OWNER)
    arena.unhold(orphan)
    assert arena.state(orphan) is SlotState.FREE
    assert arena.take(cls, 9).slot == orphan


def test_dirty_slots_go_only_on_demand_and_after_the_clean_ones(arena):
    cls = arena.register(EXTENT)
    first = arena.take(cls, 0).slot
    arena.seal(first)
    arena.unhold(first)
    for owner in (1, 2, 3):
        fill(arena, cls, owner)
    assert [arena.take(cls, 9, dirty=True).evicted for _ in range(3)] == [(1,), (2,), (3,)]
    assert arena.take(cls, 9) is None
    assert arena.take(cls, 9, dirty=True).evicted == (0,)


def test_another_class_gets_the_extent_that_was_idle_longest(arena):
    small, large = arena.register(2 * PAGE_BYTES), arena.register(EXTENT)
    slots = [fill(arena, small, owner) for owner in range(8)]
    arena.touch(slots[0])
    assert arena.take(large, 10).evicted == (2, 3)
    assert arena.check() == []


def test_classes_share_the_arena_by_recency_of_use(arena):
    small, large = arena.register(2 * PAGE_BYTES), arena.register(EXTENT)
    for owner in range(8):
        fill(arena, small, owner)
    evicted = []
    for owner in range(10, 14):
        evicted.append(arena.take(large, owner).evicted)
    assert evicted == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_an_extent_too_small_for_a_slot_is_never_given_to_its_class():
    arena = Arena(EXTENT + PAGE_BYTES, EXTENT)
    large, small = arena.register(EXTENT), arena.register(PAGE_BYTES)
    assert fill(arena, large, 0) == 0
    assert fill(arena, small, 1) == 4
    assert arena.take(large, 2).evicted == (0,)
    assert arena.take(large, 3) is None
    arena.close()


@pytest.mark.parametrize("verb", ["seal", "clean", "abandon", "disown", "hold", "unhold", "touch", "view"])
def test_no_verb_takes_a_free_slot(arena, verb):
    with pytest.raises(InvalidArgument, match="slot 3: it is FREE"):
        vars(Arena)[verb](arena, 3)
    assert arena.check() == []


def test_more_unholds_than_holds_are_refused(arena):
    slot = fill(arena, arena.register(100), 0)
    with pytest.raises(InvalidArgument, match="not held"):
        arena.unhold(slot)


def test_closing_leaves_open_views_readable_and_may_be_repeated():
    arena = Arena(EXTENT)
    arena.back()
    view = arena.view(arena.take(arena.register(100), 0).slot)
    view[:] = b"x" * 100
    arena.close()
    arena.close()
    assert bytes(view) == b"x" * 100


SIZES = (3000, 2 * PAGE_BYTES, 5000, EXTENT)


class ArenaMachine(RuleBasedStateMachine):
    """The arena against a dictionary: slot -> [state, owner, holders, content, size, last use]."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(3 * EXTENT + PAGE_BYTES, EXTENT)
        self.arena.back()
        self.classes = [self.arena.register(size) for size in SIZES]
        self.model: dict[int, dict] = {}
        self.time = 0
        self.owners = 0

    def teardown(self) -> None:
        self.arena.close()

    def stamp(self, slot: int) -> None:
        self.time += 1
        self.model[slot]["used"] = self.time

    def idle(self, *states: SlotState) -> dict[int, dict]:
        return {s: m for s, m in self.model.items() if m["state"] in states and m["holders"] == 0}

    @rule(kind=st.integers(0, len(SIZES) - 1), dirty=st.booleans())
    def take(self, kind: int, dirty: bool) -> None:
        self.owners += 1
        allowed = self.idle(SlotState.CLEAN, SlotState.DIRTY) if dirty else self.idle(SlotState.CLEAN)
        taken = self.arena.take(self.classes[kind], self.owners, dirty=dirty)
        mine = {s: m for s, m in allowed.items() if m["size"] == SIZES[kind]}
        if taken is None:
            assert not mine
            return
        by_owner = {m["owner"]: s for s, m in allowed.items()}
        victims = [by_owner[owner] for owner in taken.evicted]  # KeyError: something in use was evicted
        own = [s for s in victims if s in mine]
        if own:
            assert len(victims) == 1
            first = [s for s in mine if mine[s]["state"] is SlotState.CLEAN] or list(mine)
            assert own[0] == min(first, key=lambda s: mine[s]["used"])
        for slot in victims:
            del self.model[slot]
        assert taken.slot not in self.model
        content = self.owners % 256
        self.arena.view(taken.slot)[:] = bytes([content]) * SIZES[kind]
        self.model[taken.slot] = {
            "state": SlotState.FILLING,
            "owner": self.owners,
            "holders": 1,
            "content": content,
            "size": SIZES[kind],
        }
        self.stamp(taken.slot)

    @precondition(lambda self: self.model)
    @rule(
        data=st.data(),
        verb=st.sampled_from(["seal", "clean", "abandon", "disown", "hold", "unhold", "touch"]),
    )
    def change(self, data: st.DataObject, verb: str) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        model = self.model[slot]
        state, live = model["state"], (SlotState.FILLING, SlotState.DIRTY, SlotState.CLEAN)
        allowed = {
            "seal": state is SlotState.FILLING,
            "clean": state in (SlotState.FILLING, SlotState.DIRTY),
            "abandon": state is SlotState.FILLING,
            "disown": state in live,
            "hold": state in live,
            "unhold": model["holders"] > 0,
            "touch": True,
        }[verb]
        call = vars(Arena)[verb]
        if not allowed:
            with pytest.raises(InvalidArgument):
                call(self.arena, slot)
            return
        call(self.arena, slot)
        self.stamp(slot)
        model["holders"] += {"hold": 1, "unhold": -1}.get(verb, 0)
        model["state"] = {
            "seal": SlotState.DIRTY,
            "clean": SlotState.CLEAN,
            "abandon": SlotState.ORPHAN,
            "disown": SlotState.ORPHAN,
        }.get(verb, state)
        if model["state"] is SlotState.ORPHAN:
            model["owner"] = NO_OWNER
            if model["holders"] == 0:
                del self.model[slot]

    @invariant()
    def agrees(self) -> None:
        arena = self.arena
        assert arena.check() == []
        end = 0
        for slot, m in sorted(self.model.items()):
            assert (arena.state(slot), arena.owner(slot), arena.holders(slot)) == (
                m["state"], m["owner"], m["holders"],
            )  # fmt: skip
            assert bytes(arena.view(slot)) == bytes([m["content"]]) * m["size"]
            assert arena.offset(slot) >= end
            end = arena.offset(slot) + m["size"]
        assert end <= arena.nbytes
        for state in (SlotState.FILLING, SlotState.DIRTY, SlotState.CLEAN, SlotState.ORPHAN):
            assert arena.count(state) == sum(m["state"] is state for m in self.model.values())


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_a_slot_of_no_size_or_for_no_row_is_refused_and_changes_nothing(arena):
    with pytest.raises(InvalidArgument, match="a block of 0 bytes"):
        arena.register(0)
    kind = arena.register(PAGE_BYTES)
    with pytest.raises(InvalidArgument, match="owner=-1"):
        arena.take(kind, -1)
    assert arena.used_bytes == 0
    assert arena.check() == []
