"""What all tests of stores rely on: a table that contradicts another one is found, whichever it is."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvstore.arena import Arena
from kvstore.embedded import Embedded
from kvstore.hashing import block_hashes
from kvstore.leases import Lease
from kvstore.payloads.direct import PAGE_BYTES
from kvstore.prefix_index import NONE, BlockState
from kvstore.slots import SlotState
from kvstore.store import Store
from tests.kvstore.blocks import Conversation, open_store, store_chain, tokens


@dataclass
class Change:
    """A value of a table, or of an object, that is another one for a while."""

    table: Any
    key: Any
    value: Any

    def __enter__(self) -> None:
        if isinstance(self.key, str):
            self.before = getattr(self.table, self.key)
            setattr(self.table, self.key, self.value)
        else:
            self.known = not isinstance(self.table, dict) or self.key in self.table
            self.before = self.table[self.key] if self.known else None
            self.table[self.key] = self.value

    def __exit__(self, *_: object) -> None:
        if isinstance(self.key, str):
            setattr(self.table, self.key, self.before)
        elif self.known:
            self.table[self.key] = self.before
        else:
            del self.table[self.key]


class Tables:
    """Those of a store with four blocks in both tiers, a pinned unit at their end, and one being filled."""

    def __init__(self, embedded: Embedded) -> None:
        self.embedded = embedded
        worker = Conversation(embedded)
        hashes = block_hashes(worker.namespace, tokens(1, 5))
        assert store_chain(embedded, worker.namespace, hashes[:4])
        embedded.curate(lambda curator: curator.pin(hashes[3].hex(), 1000.0))
        embedded.reserve(worker.namespace, hashes[3], hashes[4:])
        self.store: Store = embedded._store
        self.index = self.store._index
        self.arena = self.store.arena
        self.rows = [self.index.find(block) for block in hashes]
        self.slots = [self.index.slot[row] for row in self.rows]
        self.lease: Lease = next(iter(self.store._leases))
        self.pins = self.store.keeping._pins
        (self.extent,) = self.arena._extents
        self.cls = self.arena._classes[self.extent.cls]

    def found(self, *changes: Change) -> list[str]:
        """What an audit says while something is wrong."""

        def look() -> list[str]:
            with contextlib.ExitStack() as stack:
                for change in changes:
                    stack.enter_context(change)
                return self.store.check()

        return self.embedded._call(look)

    def slot(self, number: int) -> Any:
        return self.arena._slots[self.slots[number]]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tables]:
    with open_store(tmp_path_factory.mktemp("audit") / "data") as embedded:
        yield Tables(embedded)


LAST, FILLED = 3, 4

WRONG: dict[str, Callable[[Tables], Change]] = {
    "its hash leads elsewhere": lambda t: Change(t.index.hashes, t.rows[0], b"x" * 32),
    "2 children counted, 1 found": lambda t: Change(t.index.children, t.rows[0], 2),
    "filling with slot -1": lambda t: Change(t.index.slot, t.rows[FILLED], NONE),
    "filling with slot .*, place 7": lambda t: Change(t.index.place, t.rows[FILLED], 7),
    "absent with slot": lambda t: Change(t.index.state, t.rows[0], BlockState.ABSENT),
    "a hole that nothing keeps, or with a mark": lambda t: Change(
        t.index.state, t.rows[LAST], BlockState.ABSENT
    ),
    "kinds 0 without or beside a unit record": lambda t: Change(t.index.kinds, t.rows[LAST], 0),
    "-1 holds": lambda t: Change(t.index.holds, t.rows[0], -1),
    "depth 9 below depth 1": lambda t: Change(t.index.depth, t.rows[1], 9),
    "which is CLEAN and belongs to": lambda t: Change(t.index.slot, t.rows[0], t.slots[1]),
    "at place -1 has slot": lambda t: Change(t.index.place, t.rows[0], NONE),
    "5 slots hold blocks, of which 4 are known and 0 are being read": lambda t: Change(
        t.index.slot, t.rows[0], NONE
    ),
    "keeps row .*, which has 0 holds": lambda t: Change(t.index.holds, t.rows[FILLED], 0),
    "keeps slot .* 2 times, held 1 times": lambda t: Change(t.lease.slots, t.slots[FILLED], 2),
    "fills row .*, which is PRESENT": lambda t: Change(t.index.state, t.rows[FILLED], BlockState.PRESENT),
    "holds 11776 bytes, 5 counted": lambda t: Change(t.lease.holder, "held_bytes", 5),
    "slots are out of order of use": lambda t: Change(t.slot(0), "stamp", 1 << 40),
    "an orphan has an owner or no holder": lambda t: Change(t.slot(0), "state", SlotState.ORPHAN),
    "counts by state are": lambda t: Change(t.arena._counts, SlotState.DIRTY, 9),
    "used pages are 1": lambda t: Change(t.arena, "_used_pages", 1),
    "of class -1 has 5 used slots": lambda t: Change(t.extent, "cls", -1),
    "an extent has a class and no owner": lambda t: Change(t.extent, "cls", -1),
    "extents are out of order of use": lambda t: Change(t.extent, "cls", -1),
    "used and returned slots are not those cut": lambda t: Change(t.extent, "cut", 4),
    "is wrongly open or not": lambda t: Change(t.cls, "open", type(t.cls.open)()),
    "counts .* idle slots, lists": lambda t: Change(t.extent, "clean", 9),
    "counts 9 used slots of 5": lambda t: Change(t.extent, "used", 9),
    "has 1 pins and 0 holds": lambda t: Change(t.index.holds, t.rows[LAST], 0),
    "5 rows count as pinned, 4 are": lambda t: Change(t.pins._kept, t.rows[FILLED], 1),
    "counts 2 that keep it, not 1": lambda t: Change(t.pins._kept, t.rows[1], 2),
    "pins count 7 bytes": lambda t: Change(t.pins, "nbytes", 7),
    "bytes are on disk by namespace": lambda t: Change(t.store._writer.room, "used", Counter()),
}


def test_a_block_that_is_present_and_nowhere_is_found(tables: Tables) -> None:
    row = tables.rows[0]
    faults = tables.found(Change(tables.index.slot, row, NONE), Change(tables.index.place, row, NONE))
    assert f"row {row}: present without slot or place" in faults


@pytest.mark.parametrize("words", WRONG)
def test_a_table_that_contradicts_another_is_found(tables: Tables, words: str) -> None:
    assert tables.embedded.check() == []
    faults = tables.found(WRONG[words](tables))
    assert any(re.search(words, fault) for fault in faults), faults
    assert tables.embedded.check() == []


def test_what_is_held_is_counted(tables: Tables) -> None:
    held = tables.embedded._call(tables.store.held)
    assert (held.leases, held.slots, held.rows) == (1, 1, 2)  # the pinned unit's end, and what is filled


def test_extents_that_are_out_of_order_of_use_are_found() -> None:
    arena = Arena(8 * PAGE_BYTES, extent_bytes=4 * PAGE_BYTES)
    arena.back()
    kinds = [arena.register(size * PAGE_BYTES) for size in (1, 2)]
    assert all(arena.take(kind, 0) for kind in kinds)
    assert arena.check() == []
    first, second = arena._extents
    first.stamp, second.stamp = second.stamp, first.stamp
    assert any("out of order of use" in problem for problem in arena.check())
    arena.close()
