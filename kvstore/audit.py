"""Invariants across the store's tables. For tests and for looking into a sick daemon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.arena import Arena
from kvstore.leases import LeaseTable
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.slots import SlotState

_SLOT_STATES: dict[BlockState, set[SlotState]] = {
    BlockState.ABSENT: set(),
    BlockState.FILLING: {SlotState.FILLING},
    BlockState.PRESENT: {SlotState.DIRTY, SlotState.CLEAN, SlotState.LOOSE},
}


@dataclass(frozen=True, slots=True)
class Held:
    """What is kept for somebody: all of it is zero once nobody uses the store and nothing is written."""

    leases: int
    slots: int
    rows: int  # of the index


def held(index: PrefixIndex, arena: Arena, leases: LeaseTable) -> Held:
    """Count what is held. Walks everything: for tests."""
    rows = sum(index.holds[row] > 0 for row in index)
    return Held(len(leases), arena.held(), rows)


def audit(index: PrefixIndex, arena: Arena, leases: LeaseTable, *, reading: int) -> list[str]:
    """Every violated invariant, in words; empty when sound. ``reading`` counts slots of reads in flight."""
    return [
        *index.check(),
        *arena.check(),
        *_slots(index, arena, reading),
        *_holds(index, arena, leases),
    ]


def _slots(index: PrefixIndex, arena: Arena, reading: int) -> Iterator[str]:
    owned = 0
    for row in index:
        slot = index.slot[row]
        if slot == NONE:
            continue
        owned += 1
        state = arena.state(slot)
        if arena.owner(slot) != row or state not in _SLOT_STATES[BlockState(index.state[row])]:
            yield f"row {row} has slot {slot}, which is {state.name} and belongs to {arena.owner(slot)}"
        if (state is SlotState.CLEAN) != (index.place[row] != NONE):
            yield f"row {row} at place {index.place[row]} has slot {slot}, which is {state.name}"
    used = sum(
        arena.count(state) for state in (SlotState.FILLING, SlotState.DIRTY, SlotState.CLEAN, SlotState.LOOSE)
    )
    if not owned <= used <= owned + reading:
        yield f"{used} slots hold blocks, of which {owned} are known and {reading} are being read"


def _holds(index: PrefixIndex, arena: Arena, leases: LeaseTable) -> Iterator[str]:
    for lease in leases:
        for row in lease.rows:
            if index.holds[row] < lease.rows.count(row):
                yield f"lease {lease.id} keeps row {row}, which has {index.holds[row]} holds"
        for slot, count in lease.slots.items():
            if arena.holders(slot) < count:
                yield f"lease {lease.id} keeps slot {slot} {count} times, held {arena.holders(slot)} times"
        for block, row in lease.filling.items():
            if index.hashes[row] != block or index.state[row] != BlockState.FILLING:
                yield f"lease {lease.id} fills row {row}, which is {BlockState(index.state[row]).name}"
    for holder in {lease.holder for lease in leases}:
        held = sum(lease.slots.total() * lease.block_bytes for lease in holder.leases.values())
        if held != holder.held_bytes:
            yield f"worker {holder.token[:4].hex()} holds {held} bytes, {holder.held_bytes} counted"
