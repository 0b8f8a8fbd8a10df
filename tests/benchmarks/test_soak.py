import json
import time

import pytest

from benchmarks import soak
from benchmarks.soaking.ledger import Ledger

CHAIN = [bytes([n]) * 32 for n in range(4)]
OTHER = [*CHAIN[:2], b"x" * 32]
DOCUMENT, BRANCH = (0, 1), (0, 2)


@pytest.fixture
def ledger():
    """With a document that was confirmed."""
    made = Ledger(capacity_bytes=2000)
    made.stored(CHAIN, 400)
    made.confirmed(DOCUMENT, CHAIN, CHAIN, time.monotonic(), time.monotonic())
    assert made.owed() == {DOCUMENT: 4}
    return made


def test_a_document_is_owed_until_it_may_have_been_evicted(ledger):
    ledger.stored([], 1000)
    assert ledger.owed() == {DOCUMENT: 4}
    ledger.stored([], 1)
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


def test_a_short_soak_finds_nothing_and_says_what_it_did(tmp_path):
    figures = tmp_path / "soak.json"
    options = ["--minutes", "0.1", "--seed", "3", "--payloads", "slab", "--data", str(tmp_path)]
    assert soak.main([*options, "--json", str(figures)]) == 0
    result = json.loads(figures.read_text())
    assert result["faults"] == sum(result["faults_by_kind"].values()) > 0
    assert result["hits"] > 0
    assert [result[name] for name in soak.MUST_BE_ZERO] == [0] * 6
