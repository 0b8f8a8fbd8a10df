"""The index that a start builds in arrays, against one that is built block by block."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import catalog as catalog_module
from kvstore.arena import Arena
from kvstore.catalog import BLOCK_DTYPE, BlockRecord, UnitRecord
from kvstore.disk import DiskTier, NewBlock
from kvstore.hashing import ROOT
from kvstore.layout import DType, LatentLayout
from kvstore.namespace import Namespace
from kvstore.payloads.direct import Run
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.restore import restore, used_bytes
from kvstore.settings import MIB, StoreSettings
from kvstore.spaces import SpaceTable
from tests.kvstore.blocks import CHOSEN

LAYOUTS = [
    LatentLayout(num_layers=1, latent_rank=1, rope_dim=0, dtype=DType.FP8),
    LatentLayout(num_layers=1, latent_rank=3, rope_dim=1, dtype=DType.FP8),
]
SPACES = [
    Namespace(LAYOUTS[0], model="a"),
    Namespace(LAYOUTS[0], model="b"),
    Namespace(LAYOUTS[1], model="a"),
]


@dataclass(frozen=True)
class Made:
    """A block of the catalogue, and what will have happened to it."""

    number: int
    parent: int | None
    space: int
    depth: int
    used: float
    fate: str


@st.composite
def forests(draw: st.DrawFn) -> list[Made]:
    made: list[Made] = []
    for number in range(draw(st.integers(0, 25))):
        parent = draw(st.none() | st.sampled_from(made)) if made else None
        made.append(
            Made(
                number=number,
                parent=parent.number if parent else None,
                space=parent.space if parent else draw(st.integers(0, len(SPACES) - 1)),
                depth=parent.depth + 1 if parent else 1,
                used=float(draw(st.integers(0, 9))),
                fate=draw(st.sampled_from(["kept", "kept", "kept", "unnamed", "damaged", "payload lost"])),
            )
        )
    return made


def name(number: int | None) -> bytes:
    # Keys of the catalogue are in no order of the chains.
    return ROOT if number is None else ((number + 1) * 2654435761 % (1 << 32)).to_bytes(4, "big") * 8


class Disk:
    """A data directory that is closed and opened like a store's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = StoreSettings(path, disk_bytes=16 * MIB, host_bytes=MIB, payloads=CHOSEN["payloads"])

    def fill(self, made: list[Made], units: list[UnitRecord]) -> dict[bytes, BlockRecord]:
        """Store the blocks; their records, before anything happens to them."""
        disk = DiskTier(self.settings)
        ids = [disk.add_namespace(space)[0] for space in SPACES]
        records: dict[bytes, BlockRecord] = {}
        for one in made:
            layout = SPACES[one.space].layout
            data = Run.of(disk.lead, bytes([one.number]) * layout.block_bytes)
            new = NewBlock(name(one.number), name(one.parent), ids[one.space], one.depth, one.used, data)
            (stored,) = disk.write(layout, [new], [])
            records[new.hash] = new.record(stored)
        disk.catalog.commit(units=units)
        disk.catalog.commit(drop_blocks=[name(one.number) for one in made if one.fate == "unnamed"])
        for one in made:
            if one.fate == "payload lost":
                # Under a key that no payload has: as if its file had been cut.
                lost = replace(records[name(one.number)], place=(1 << 20) + 8 * one.number)
                disk.catalog.commit(blocks=[lost])
        disk.close()
        self.damage([name(one.number) for one in made if one.fate == "damaged"])
        return records

    def damage(self, blocks: list[bytes]) -> None:
        with (
            lmdb.open(str(self.path / "catalog"), map_size=16 * MIB, max_dbs=4) as env,
            env.begin(write=True, db=env.open_db(b"blocks")) as txn,
        ):
            for block in blocks:
                value = bytearray(txn.get(block))
                value[40] ^= 1
                txn.put(block, bytes(value))


def block_by_block(records: list[BlockRecord], units: list[UnitRecord], lost: set[bytes]) -> PrefixIndex:
    """What ``restore`` has to come to, the plain way."""
    index = PrefixIndex()
    for record in records:
        parent = NONE
        if record.parent != ROOT:
            parent = index.find(record.parent)
            if parent == NONE:
                parent = index.add(record.parent, NONE, record.namespace, record.depth - 1, record.used)
        row = index.find(record.hash)
        if row == NONE:
            row = index.add(record.hash, parent, record.namespace, record.depth, record.used)
        index.adopt(row, parent)
        index.state[row], index.place[row], index.page[row] = BlockState.PRESENT, record.place, record.page
        index.length[row], index.codec[row] = record.length, record.codec
        index.checksum[row], index.used[row] = record.checksum, record.used
    for block in lost:
        index.lose(index.find(block))
    for unit in units:
        row = index.find(unit.hash)
        if row != NONE and index.state[row] == BlockState.PRESENT:
            index.mark(row, unit.kinds, unit.used)
            index.used[row] = max(index.used[row], unit.used)
    for row in sorted(index, key=lambda row: -index.depth[row]):
        if (parent := index.parent[row]) != NONE:
            index.used[parent] = max(index.used[parent], index.used[row])
    return index


def described(index: PrefixIndex) -> dict[bytes, tuple]:
    """All that matters of an index, by hash, whatever the numbers of its rows."""
    return {index.hashes[row]: description(index, row) for row in index}


def description(index: PrefixIndex, row: int) -> tuple:
    parent, absent = index.parent[row], index.state[row] == BlockState.ABSENT
    stored = () if absent else (index.page[row], index.length[row], index.codec[row], index.checksum[row])
    return (
        index.state[row],
        None if parent == NONE else index.hashes[parent],
        index.children[row],
        index.namespace[row],
        index.depth[row],
        index.place[row],
        index.slot[row],
        index.kinds[row],
        # A hole was never used: it only has to be as young as what stands on it.
        index.used[row] if not absent else None,
        *stored,
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=forests(), data=st.data())
@pytest.mark.usefixtures("payload_kind")
def test_a_start_builds_what_adding_block_by_block_in_any_order_builds(tmp_path_factory, made, data):
    path = tmp_path_factory.mktemp("restore")
    marked = data.draw(st.sets(st.sampled_from(made)) if made else st.just(set()))
    units = [UnitRecord(name(one.number), 1, 64, 1, 5.0, 5.0, 3) for one in marked]
    disk = Disk(path / "data")
    records = disk.fill(made, units)
    sound = [records[name(one.number)] for one in made if one.fate == "kept"]
    lost = {name(one.number) for one in made if one.fate == "payload lost"}
    shown = data.draw(st.permutations(sound + [records[block] for block in lost]))
    expected = block_by_block(shown, units, lost)

    index, counters = PrefixIndex(), Counter()
    with pytest.MonkeyPatch.context() as small:  # so that a few blocks take several transactions
        small.setattr(catalog_module, "_RECORDS_A_TXN", 3)
        tier, arena = DiskTier(disk.settings), Arena(MIB, lead=0)
        try:
            spaces = SpaceTable(tier, arena)
            spaces.restore()
            used = restore(index, tier, spaces, counters)
            assert used == used_bytes(index, tier, spaces)
            assert used.total() == sum(
                tier.stored_bytes(SPACES[one.space].layout.block_bytes, records[name(one.number)].length)
                for one in made
                if one.fate == "kept"
            )
        finally:
            arena.close()
            tier.close()
    assert index.check() == []
    assert described(index) == described(expected)
    assert {index.hashes[row]: use.hits for row, use in index.units.items()} == {
        expected.hashes[row]: 3 for row in expected.units
    }
    assert counters["lost_payloads"] == len(lost)
    assert counters["catalog_skipped"] == sum(one.fate == "damaged" for one in made)


def test_a_record_whose_depth_does_not_fit_its_parent_is_not_tied_to_it():
    """Else a forged catalogue could tie a chain into a ring."""
    index = PrefixIndex()
    rows = [(name(i), name(1 - i), 1, 1, i + 1, 0, 64, 0, 0, 0.0) for i in range(2)]
    records = np.array(rows, BLOCK_DTYPE)
    index.extend(records)
    index.link(records["parent"].copy())
    assert [index.parent[row] for row in index] == [NONE, NONE]
    assert index.check() == []


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]], ids=["by rising hash", "by falling hash"])
def test_parents_whose_hashes_begin_alike_are_told_apart(order):
    chain = [b"alike to" + bytes([tail]) * 24 for tail in (3, 2, 1)]
    rows = [(chain[i], chain[i - 1] if i else ROOT, 1, i + 1, i + 1, 0, 64, 0, 0, 0.0) for i in order]
    records = np.array(rows, BLOCK_DTYPE)
    index = PrefixIndex()
    index.extend(records)
    index.link(records["parent"].copy())
    assert index.check() == []
    first, second, third = map(index.find, chain)
    assert [index.parent[row] for row in (first, second, third)] == [NONE, first, second]
