import contextlib
import inspect
import json
import random
import time

import pytest

from benchmarks import soak
from benchmarks.options import BenchmarkError
from benchmarks.soaking import caller_faults, daemon_faults, disk_faults, worker_faults
from benchmarks.soaking.faults import EARLY, FAULTS, in_order
from benchmarks.soaking.ledger import Ledger
from benchmarks.soaking.scene import Scene
from kvstore.hashing import ROOT

CHAIN = [bytes([n]) * 32 for n in range(4)]
OTHER = [*CHAIN[:2], b"x" * 32]
DOCUMENT, BRANCH = (0, 1), (0, 2)
# At least one of each sort; all kinds together take most of a minute.
QUICK = (
    *("kill_daemon", "hang_up", "step_clock", "kill_task", "drop_loads", "bad_places"),
    *("kill_forked_worker", "hostile_connections", "fail_writes"),
)


@pytest.fixture
def ledger():
    """With a document that was confirmed."""
    made = Ledger(capacity_bytes=2000)
    made.stored(CHAIN, 100)
    made.confirmed(DOCUMENT, CHAIN, CHAIN, time.monotonic(), time.monotonic())
    assert made.owed() == {DOCUMENT: 4}
    return made


def test_a_document_is_owed_until_it_may_have_been_evicted(ledger):
    others = [bytes([n]) * 32 for n in range(10, 20)]
    ledger.stored(others[:5], 100)
    ledger.used(others[5:], 100)
    ledger.used(others, 100)  # which takes no more of the disk
    assert ledger.owed() == {DOCUMENT: 4}
    ledger.stored([b"y" * 32], 1)
    assert ledger.owed() == {}


def test_what_is_used_behind_a_document_counts_once_for_it_may_stay_in_its_place(ledger):
    for _ in range(3):
        ledger.used([b"x" * 32, b"y" * 32], 500)
    assert ledger.owed() == {DOCUMENT: 4}
    ledger.used([b"z" * 32], 1)
    assert ledger.owed() == {}


def test_a_damaged_block_is_owed_again_once_it_was_stored_again(ledger):
    before = time.monotonic()
    ledger.damage(CHAIN[2])
    assert ledger.owed() == {DOCUMENT: 2}
    ledger.confirmed(DOCUMENT, CHAIN, CHAIN[2:], before, time.monotonic())
    assert ledger.owed() == {DOCUMENT: 2}
    ledger.confirmed(DOCUMENT, CHAIN, CHAIN[2:], time.monotonic(), time.monotonic())
    assert ledger.owed() == {DOCUMENT: 4}


def test_what_was_stored_while_the_disk_lied_is_not_owed_nor_what_stands_on_it(ledger):
    now = time.monotonic()
    ledger.spoil(now - 1, now)
    assert ledger.owed() == {}
    ledger.confirmed(DOCUMENT, CHAIN, CHAIN, now - 1, time.monotonic())
    assert ledger.owed() == {}
    ledger.confirmed(BRANCH, OTHER, OTHER[2:], time.monotonic(), time.monotonic())
    assert ledger.owed() == {}


def test_a_block_that_was_filled_again_is_owed_by_whoever_filled_it(ledger):
    ledger.stored(CHAIN[1:2], 100)
    assert ledger.owed() == {DOCUMENT: 1}


@pytest.fixture
def scene(tmp_path, monkeypatch):
    """A daemon that nobody works with."""
    monkeypatch.setattr("benchmarks.soaking.scene.SETTLE_SECONDS", 0.5)
    flags = ["--host-bytes", "8MiB", "--http", "127.0.0.1:0"]
    with contextlib.closing(contextlib.ExitStack()) as stack:
        made = Scene(tmp_path, flags, random.Random(1))
        stack.push(made.__exit__)
        yield made


def test_what_is_held_is_a_leak_and_what_is_not_written_any_more_is_stuck(scene):
    scene.require_writing()
    scene.require_nothing_held()
    assert (scene.seen.stuck, +scene.seen.leaked, scene.seen.violated) == ([], {}, [])
    hashes = scene.asker.hashes(0, 0)
    lease = scene.asker.store.reserve(scene.asker.keys[0], ROOT, hashes).lease
    scene.require_nothing_held()
    assert scene.seen.leaked["leases"] == 1
    scene.asker.store.release(lease)
    scene.daemon.tell(fail_writes=True)
    scene.require_writing()
    assert [each["verb"] for each in scene.seen.stuck] == ["durable"]


def test_a_switch_that_the_daemon_does_not_have_is_refused(scene):
    with pytest.raises(BenchmarkError, match="no switch fail_nothing"):
        scene.daemon.tell(fail_nothing=True)


def test_every_fault_there_is_belongs_to_a_round():
    modules = (caller_faults, daemon_faults, disk_faults, worker_faults)
    there = {
        name
        for module in modules
        for name, made in vars(module).items()
        if inspect.isfunction(made) and made.__module__ == module.__name__ and not name.startswith("_")
    }
    assert {fault.__name__ for fault in FAULTS} == there
    assert len(FAULTS) == len(there)


@pytest.mark.parametrize("seed", range(20))
def test_a_round_has_each_fault_once_and_leaves_the_daemon_alive_in_its_second_half(seed):
    dealt = in_order(random.Random(seed), FAULTS)
    assert len(dealt) == len(FAULTS)
    assert set(dealt) == set(FAULTS)
    assert set(dealt[: len(dealt) // 2]) >= EARLY
    assert dealt != in_order(random.Random(seed + 1), FAULTS)


def test_an_unknown_fault_is_refused_and_those_there_are_are_named(capsys):
    assert soak.main(["--only", "kill_daemon,kill_cat"]) == 2
    said = capsys.readouterr().err
    assert "kill_cat: no such fault" in said
    assert "step_clock" in said


def test_a_short_soak_finds_nothing_and_says_what_it_did(tmp_path):
    figures = tmp_path / "soak.json"
    options = ["--minutes", "0.1", "--seed", "3", "--payloads", "slab", "--data", str(tmp_path)]
    assert soak.main([*options, "--only", ",".join(QUICK), "--json", str(figures)]) == 0
    result = json.loads(figures.read_text())
    assert result["faults"] == sum(result["faults_by_kind"].values())
    assert result["faults_by_kind"].keys() == set(QUICK)
    assert result["hits"] > 0
    assert result["memory"]["slab"]["most"] > 0
    assert any(each.startswith("half_handshakes") for each in result["callers"])
    assert [result[name] for name in soak.MUST_BE_ZERO] == [0] * len(soak.MUST_BE_ZERO)


def test_a_soak_fails_if_the_daemons_memory_grows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.soaking.curve.Curve.grows", True)
    options = ["--minutes", "0.05", "--payloads", "lmdb", "--data", str(tmp_path), "--only", "kill_worker"]
    assert soak.main(options) == 1
    assert "the daemon's memory grows" in capsys.readouterr().out
