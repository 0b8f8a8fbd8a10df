"""``latentkv check``: what it finds, what it drops, and what it leaves alone."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore.api import ReserveState
from kvstore.catalog import BlockRecord, Catalog
from kvstore.checking import check
from kvstore.embedded import Embedded
from kvstore.errors import DataDirError
from kvstore.hashing import ROOT, block_hashes
from kvstore.namespace import Namespace
from kvstore.payloads.direct import Run
from kvstore.payloads.kinds import OPEN
from kvstore.settings import MIB, PayloadKind, StoreSettings
from kvstore.testing.chains import OTHER, SMALL, content, load_chain, store_chain, tokens
from server.cli import app
from tests.server.conftest import Fleet, document, start

SIZE = SMALL.block_bytes
BLOCKS = 12
KINDS: tuple[PayloadKind, ...] = ("lmdb", "slab")

pytestmark = pytest.mark.parametrize("kind", KINDS)


class Made:
    """A closed store with a chain of twelve blocks that forks behind the eighth, and units at both ends."""

    def __init__(self, path: Path, kind: PayloadKind) -> None:
        self.path = path
        self.settings = StoreSettings(
            path, host_bytes=MIB, disk_bytes=16 * MIB, interval=0, payloads=kind, codec="zstd"
        )
        with Embedded(self.settings) as store:
            self.namespace = store.open_namespace(Namespace(layout=SMALL))
            self.hashes = block_hashes(self.namespace, tokens(1, BLOCKS))
            self.fork = block_hashes(self.namespace, tokens(1, BLOCKS)[: 64 * 8] + tokens(2, 4))
            for chain in (self.hashes, self.fork):
                assert store_chain(store, self.namespace, chain)
            other = store.open_namespace(Namespace(layout=OTHER))
            wide = block_hashes(other, tokens(3, 3))
            assert store_chain(store, other, wide, nbytes=OTHER.block_bytes, compressible=True)

    @property
    def files(self) -> list[Path]:
        return [file for file in (self.path / "payloads" / str(SIZE)).iterdir() if file.name != "lock.mdb"]

    def catalog(self) -> Catalog:
        return Catalog.open(self.path / "catalog", 4 * MIB)

    def record(self, block: bytes) -> BlockRecord:
        catalog = self.catalog()
        (fields,) = [one for chunk in catalog.blocks() for one in chunk.tolist() if one[0] == block]
        catalog.close()
        return BlockRecord(*fields)

    def commit(self, **changes: object) -> None:
        catalog = self.catalog()
        catalog.commit(**changes)  # type: ignore[arg-type]
        catalog.close()

    def usable(self) -> tuple[int, int]:
        """Leading blocks of both chains that a store brings, each byte right."""
        with Embedded(self.settings) as store:
            assert store.check() == []
            return tuple(load_chain(store, self.namespace, chain) for chain in (self.hashes, self.fork))  # type: ignore[return-value]


@pytest.fixture
def made(tmp_path: Path, kind: PayloadKind) -> Made:
    return Made(tmp_path / "data", kind)


def flip(made: Made) -> None:
    stored = content(made.hashes[9], SIZE)
    for file in made.files:
        at = file.read_bytes().find(stored)
        if at >= 0:
            with open(file, "r+b") as damaged:
                damaged.seek(at + 5000)
                damaged.write(bytes([stored[5000] ^ 1]))


def truncate(made: Made) -> None:
    for file in made.files:
        os.truncate(file, 8192)


def delete(made: Made) -> None:
    for file in made.files:
        file.unlink()


def delete_directory(made: Made) -> None:
    shutil.rmtree(made.path / "payloads" / str(SIZE))


def lose_last_block(made: Made) -> None:
    made.commit(drop_blocks=[made.hashes[-1]])


def misplace_unit(made: Made) -> None:
    catalog = made.catalog()
    units = [replace(unit, tokens=64) for unit in catalog.units() if unit.hash == made.hashes[-1]]
    catalog.commit(units=units)
    catalog.close()


def lose_namespace(made: Made) -> None:
    made.commit(blocks=[replace(made.record(made.hashes[-1]), namespace=99)])


def lose_middle_namespace(made: Made) -> None:
    made.commit(blocks=[replace(made.record(made.hashes[10]), namespace=99)])


def first_of_depth_two(made: Made) -> None:
    made.commit(blocks=[replace(made.record(made.hashes[0]), depth=2)])


def wrong_depth(made: Made) -> None:
    made.commit(blocks=[replace(made.record(made.hashes[10]), depth=9)])


def take_place(made: Made) -> None:
    theirs = made.record(made.fork[11])
    made.commit(blocks=[replace(made.record(made.hashes[11]), place=theirs.place, page=theirs.page)])


def damage_record(made: Made) -> None:
    file = made.path / "catalog" / "data.mdb"
    data = bytearray(file.read_bytes())
    checksum = made.record(made.hashes[9]).checksum.to_bytes(8, "little")
    at = data.find(checksum)
    while at >= 0:  # also where an older page has it
        data[at] ^= 1
        at = data.find(checksum, at + 1)
    file.write_bytes(data)


# What is done, the faults that are found, how many blocks of both chains are usable once that is repaired,
# and how many are cut off behind those.
DAMAGE: dict[str, tuple[Callable[[Made], None], dict[str, int], tuple[int, int], int]] = {
    "flipped byte": (flip, {"payload_wrong": 1}, (9, 12), 2),
    "unit without block": (lose_last_block, {"unit_without_block": 1}, (11, 12), 0),
    "unit misplaced": (misplace_unit, {"unit_misplaced": 1}, (12, 12), 0),
    "record damaged": (damage_record, {"record_damaged": 1}, (9, 12), 2),
    "namespace lost": (lose_namespace, {"namespace_unknown": 1, "unit_misplaced": 1}, (11, 12), 0),
    "namespace lost in the middle": (lose_middle_namespace, {"namespace_unknown": 1}, (10, 12), 1),
    "wrong depth": (wrong_depth, {"block_misplaced": 2}, (10, 12), 0),
    "first block that is not the first": (first_of_depth_two, {"block_misplaced": 2}, (0, 0), 14),
    "another's place": (take_place, {"payload_wrong": 1}, (11, 12), 0),
}


def run(*arguments: str) -> tuple[int, dict[str, object]]:
    result = CliRunner().invoke(app, ["check", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout) if result.stdout else {"error": result.stderr}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_repair_drops_it_and_no_more(made: Made, name: str) -> None:
    harm, counts, usable, behind = DAMAGE[name]
    harm(made)
    code, found = run(str(made.path))
    assert (code, found["counts"], found["sound"], found["cut_off"]) == (1, counts, False, behind)
    again, before = run(str(made.path))
    assert (again, before) == (1, found)  # it changed nothing
    code, repaired = run(str(made.path), "--repair")
    assert (code, repaired["faults"]) == (1, found["faults"])
    assert int(str(repaired["dropped_blocks"])) + int(str(repaired["dropped_units"])) > 0
    code, found = run(str(made.path))
    assert (code, found["cut_off"], found["blocks"]) == (
        0,
        behind,
        sum(usable) - min(*usable, 8) + behind + 3,
    )
    assert made.usable() == usable
    with Embedded(made.settings) as store:
        assert store_chain(store, made.namespace, made.hashes)
        assert load_chain(store, made.namespace, made.hashes) == BLOCKS
    report = check(made.path)
    assert (report.sound, report.cut_off) == (True, 0)


def test_of_two_records_with_one_payload_repair_leaves_one(made: Made) -> None:
    one, two = made.record(made.hashes[11]), made.record(made.fork[11])
    fields = {"place": two.place, "page": two.page, "checksum": two.checksum}
    made.commit(blocks=[replace(one, **fields)])
    assert check(made.path).counts() == {"place_shared": 1}
    assert check(made.path, repair=True).dropped_blocks == 1
    assert check(made.path).sound


@pytest.mark.parametrize("harm", [truncate, delete, delete_directory])
def test_payloads_that_are_gone_are_found_and_dropped_and_others_stay(
    made: Made, harm: Callable[[Made], None]
) -> None:
    harm(made)
    report = check(made.path)
    assert report.counts()["payload_wrong"] >= BLOCKS
    assert report.blocks - report.counts()["payload_wrong"] >= 3  # the other layout's
    assert check(made.path, repair=True).dropped_blocks >= BLOCKS
    assert check(made.path).sound
    assert made.usable() == (0, 0)
    with Embedded(made.settings) as store:
        other = store.open_namespace(Namespace(layout=OTHER))
        assert load_chain(store, other, block_hashes(other, tokens(3, 3)), compressible=True) == 3


def test_a_namespace_that_cannot_be_read_is_dropped_with_its_blocks_and_stored_anew(made: Made) -> None:
    number = made.record(made.hashes[0]).namespace.to_bytes(4, "little")
    catalog = made.catalog()
    with catalog._env.begin(write=True, db=catalog._namespaces) as txn:
        record = bytearray(txn.get(number))
        record[-1] ^= 1
        txn.put(number, bytes(record))
    catalog.close()
    code, found = run(str(made.path), "--repair")
    assert (code, found["counts"]) == (1, {"record_damaged": 1, "namespace_unknown": 16})
    assert (found["dropped_blocks"], found["dropped_units"]) == (16, 3)
    assert run(str(made.path))[0] == 0
    with Embedded(made.settings) as store:
        # Its number may be another's now, whose blocks the dropped ones would have become.
        stranger = store.open_namespace(Namespace(layout=SMALL, model="stranger"))
        assert store.open_namespace(Namespace(layout=SMALL)) == made.namespace
        assert load_chain(store, stranger, block_hashes(stranger, tokens(1, BLOCKS))) == 0
        assert load_chain(store, made.namespace, made.hashes) == 0
        assert store_chain(store, made.namespace, made.hashes)
        assert load_chain(store, made.namespace, made.hashes) == BLOCKS
    assert check(made.path).sound


def test_payloads_that_the_disk_refuses_to_read_are_unreadable(made: Made, kind: PayloadKind) -> None:
    if kind == "lmdb":
        pytest.skip("LMDB itself would not open such a file")
    for file in made.files:
        file.unlink()
        file.mkdir()  # each read of it is refused
    assert check(made.path).counts() == {"payload_unreadable": 16}
    assert check(made.path, repair=True).dropped_blocks == 16
    assert check(made.path).sound
    assert made.usable() == (0, 0)


def test_faults_are_told_to_people_and_how_many_more_there_are(made: Made) -> None:
    with Embedded(made.settings) as store:
        assert store_chain(store, made.namespace, block_hashes(made.namespace, tokens(4, 12)))
    delete(made)
    result = CliRunner().invoke(app, ["check", str(made.path), "--repair"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    told = " ".join(result.stdout.split())
    assert "28 payload_wrong" in told
    assert re.search(r"and \d+ more; --json lists them dropped 28 blocks and 4 units", told)


def test_payloads_that_no_record_names_are_counted_and_freed_by_repair(made: Made, kind: PayloadKind) -> None:
    directory = made.path / "payloads" / str(SIZE)
    if kind == "slab":
        pytest.skip("in slabs only the catalogue knows what is in use")
    payloads = OPEN[kind](directory, 16 * MIB, SIZE, 1000)
    payloads.write([Run.of(payloads.lead, b"x" * SIZE)])
    payloads.close()
    report = check(made.path)
    assert (report.sound, report.unnamed) == (True, 1)
    check(made.path, repair=True)
    assert check(made.path).unnamed == 0
    assert made.usable() == (BLOCKS, BLOCKS)


def test_a_sound_store_is_sound_and_stays_as_it_is(made: Made, kind: PayloadKind) -> None:
    before = {file: file.read_bytes() for file in made.path.rglob("*") if file.name == "data.mdb"}
    result = CliRunner().invoke(app, ["check", str(made.path), "--repair"])
    assert result.exit_code == 0
    assert "sound" in result.stdout
    assert before == {file: file.read_bytes() for file in before}
    code, found = run(str(made.path))
    assert (code, found["blocks"], found["units"], found["payloads"]) == (0, 19, 4, kind)


def test_a_directory_that_is_served_is_refused(
    kind: PayloadKind, fleet: Fleet, flags: Callable[..., list[str]]
) -> None:
    daemon = start(fleet, "mapped", flags, payloads=kind)
    data = daemon.socket.parent.parent / "data"
    code, said = run(str(data))
    assert code == 2
    assert f"in use by process {daemon.process.pid}" in str(said["error"])
    assert daemon.term() == 0
    assert run(str(data))[0] == 0


def test_a_store_whose_daemon_was_killed_is_sound(
    kind: PayloadKind, fleet: Fleet, flags: Callable[..., list[str]]
) -> None:
    daemon = start(fleet, "mapped", flags, payloads=kind)
    client = fleet.connect(daemon.url)
    for seed in range(6):
        document(client, 9, seed=seed).store(client, durable=seed % 2 == 0)
    daemon.kill()
    report = check(daemon.socket.parent.parent / "data")
    assert (report.faults, report.cut_off) == ([], 0)
    assert report.blocks >= 27


def test_what_is_no_store_is_refused_and_left_alone(kind: PayloadKind, tmp_path: Path) -> None:
    code, said = run(str(tmp_path / "nothing"))
    assert code == 2
    assert "holds no store" in str(said["error"])
    assert not (tmp_path / "nothing").exists()
    made = Made(tmp_path / "data", kind)
    os.truncate(made.path / "catalog" / "data.mdb", 8192)
    with pytest.raises(DataDirError, match="catalogue"):
        check(made.path)


def test_blocks_behind_one_that_was_given_up_are_no_fault_and_wait_until_that_is_stored(
    tmp_path: Path, kind: PayloadKind
) -> None:
    settings = StoreSettings(tmp_path / "data", host_bytes=MIB, disk_bytes=16 * MIB, payloads=kind)
    with Embedded(settings) as store:
        namespace = store.open_namespace(Namespace(layout=SMALL))
        hashes = block_hashes(namespace, tokens(1, 6))
        other = store.reserve(namespace, ROOT, hashes[:3])
        for block in other.blocks:
            assert block.data is not None
            block.data[:] = content(block.hash, SIZE)
        store.commit(other.lease, hashes[:2])
        assert store_chain(store, namespace, hashes)  # the third is pending: the others are stored behind it
        store.release(other.lease)
        assert load_chain(store, namespace, hashes) == 2
    result = CliRunner().invoke(app, ["check", str(settings.data), "--repair"])
    assert result.exit_code == 0
    assert "3 blocks are cut off" in result.stdout
    report = check(settings.data)
    assert (report.faults, report.cut_off, report.blocks, report.units) == ([], 3, 5, 1)
    with Embedded(settings) as store:
        assert load_chain(store, namespace, hashes) == 2
        answer = store.reserve(namespace, ROOT, hashes)
        assert [block.state for block in answer.blocks].count(ReserveState.FILL) == 1
        store.release(answer.lease)
        assert store_chain(store, namespace, hashes)
        assert load_chain(store, namespace, hashes) == 6
    report = check(settings.data)
    assert (report.faults, report.cut_off) == ([], 0)
