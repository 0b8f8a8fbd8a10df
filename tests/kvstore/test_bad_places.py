"""Places of the disk that can't be written or read, and files that can't be opened, cost what lies there."""

import logging
import os

import pytest

from kvstore.hashing import block_hashes
from kvstore.payloads.slab import SlabPayloads
from kvstore.settings import MIB
from kvstore.testing.faults import Faults
from tests.kvstore.blocks import (
    CHOSEN,
    SMALL,
    Conversation,
    in_loop,
    load_chain,
    open_store,
    store_chain,
    tokens,
)
from tests.kvstore.test_payloads_slab import LIMIT, SIZE, SLOT, read, write
from tests.kvstore.test_pipeline import Pipes

PAGE = 4096
SLOT_OF_SMALL = 3 * PAGE
SLAB = "slab-8-0"
EVERYWHERE = [(f"slab-8-{number}", 0, 1 << 40) for number in range(32)]


@pytest.fixture(autouse=True)
def slabs(monkeypatch):
    monkeypatch.setitem(CHOSEN, "payloads", "slab")


@pytest.fixture
def faults():
    made = Faults()
    made.inner = made.open_slab
    return made


@pytest.fixture
def store(tmp_path, faults):
    made = SlabPayloads(tmp_path / "p", LIMIT, SIZE, faults.open_file)
    made.retain(())
    yield made
    made.close()


def documents(store, seeds, blocks=16):
    """Store chains; how many of them are durable."""
    space = Conversation(store).namespace
    return sum(bool(store_chain(store, space, block_hashes(space, tokens(seed, blocks)))) for seed in seeds)


@pytest.mark.parametrize("syncs", [False, True], ids=["at the write", "at the sync"])
def test_documents_become_durable_beside_a_place_that_cannot_be_written(tmp_path, faults, caplog, syncs):
    faults.bad_syncs = syncs
    with open_store(tmp_path, faults) as store:
        assert documents(store, [1])
        faults.bad_places = [(SLAB, 20 * SLOT_OF_SMALL + 5, 20 * SLOT_OF_SMALL + 6)]
        # What a sync loses is known only once it has failed, and not which write it was.
        assert documents(store, range(2, 12)) >= 10 - 2 * syncs
        status = store.status()
        assert status.mode == "ok"
        assert status.counters["bad_places"] == 1
        assert status.disk.blocks == status.counters["stored_blocks"]
        assert f"offset={20 * SLOT_OF_SMALL}" in caplog.text
        assert store.check() == []
    with open_store(tmp_path, faults) as store:
        space = Conversation(store).namespace
        for seed in range(1, 12):
            assert load_chain(store, space, block_hashes(space, tokens(seed, 16))) == 16


def test_a_bad_region_of_many_slots_is_found_slot_by_slot_and_the_disk_stays_in_use(store, faults):
    faults.bad_places = [(SLAB, 0, 6 * SLOT)]
    places = [write(store, seed)[0] for seed in range(40)]
    assert [read(store, place) for place in places] == [read(store, place) for place in places]
    assert 0 < store.set_aside().places <= 6
    assert store.set_aside().nbytes == store.set_aside().places * SLOT


def test_a_disk_that_takes_nothing_sets_nothing_aside(store, faults):
    faults.bad_places = EVERYWHERE
    with pytest.raises(Exception, match="Input/output error"):
        write(store, 1, 2, 3)
    assert store.set_aside().places == 0
    faults.bad_places = []
    assert write(store, 1, 2, 3)


def test_what_is_set_aside_is_given_out_no_more_and_counts_as_used(store, faults):
    first = write(store, 1)[0]
    faults.bad_places = [(SLAB, SLOT, SLOT + PAGE)]
    second = write(store, 2)[0]
    faults.bad_places = []
    store.free([first.key, second.key])
    taken = {place.key for seed in range(9) for place in write(store, seed)}
    bad = first.key + 8  # the key of the next slot
    assert bad not in taken
    assert store.missing([bad]) == {bad}


def test_the_store_evicts_for_what_is_set_aside(tmp_path, faults):
    with open_store(tmp_path, faults, host_bytes=4 * MIB) as store:
        before = store._store._disk.capacity_bytes
        faults.bad_places = [(SLAB, at * SLOT_OF_SMALL, at * SLOT_OF_SMALL + 1) for at in range(0, 60, 2)]
        assert documents(store, range(1, 60), 32) == 59
        aside = store._store._disk.set_aside()
        assert aside.places == store.status().counters["bad_places"] >= 25
        assert store._store._disk.capacity_bytes == before - aside.nbytes
        assert store.status().mode == "ok"
        assert store.status().counters.get("write_failures", 0) == 0


def test_a_place_that_cannot_be_read_is_a_miss_and_is_set_aside(tmp_path, faults, caplog):
    with open_store(tmp_path, faults) as store:
        assert documents(store, [1, 2])
    with open_store(tmp_path, faults) as store:
        faults.bad_places = [(SLAB, 3 * SLOT_OF_SMALL + PAGE, 3 * SLOT_OF_SMALL + PAGE + 1)]
        space = Conversation(store).namespace
        chains = [block_hashes(space, tokens(seed, 16)) for seed in (1, 2)]
        assert sorted(load_chain(store, space, hashes) for hashes in chains) == [3, 16]
        counters = store.status().counters
        assert (counters["read_errors"], counters["bad_places"]) == (1, 1)
        assert "checksum_failures" not in counters
        for hashes in chains:
            assert store_chain(store, space, hashes)  # heals, elsewhere
            assert load_chain(store, space, hashes) == 16
        assert store.status().counters["read_errors"] == 1
        assert store.check() == []
    with open_store(tmp_path, faults) as store:
        assert [load_chain(store, space, hashes) for hashes in chains] == [16, 16]


def test_a_disk_that_cannot_be_read_at_all_loses_nothing(tmp_path, faults):
    with open_store(tmp_path, faults) as store:
        assert documents(store, [1])
    with open_store(tmp_path, faults) as store:
        faults.bad_places = EVERYWHERE
        space = Conversation(store).namespace
        hashes = block_hashes(space, tokens(1, 16))
        assert load_chain(store, space, hashes) == 0
        assert store.status().counters["bad_places"] == 0
        faults.bad_places = []
        assert load_chain(store, space, hashes) == 16


@pytest.mark.parametrize("damage", ["directory", "loop"])
def test_a_slab_that_cannot_be_opened_costs_its_blocks_and_not_the_start(tmp_path, caplog, damage):
    caplog.set_level(logging.WARNING)
    with open_store(tmp_path, host_bytes=4 * MIB) as store:
        assert documents(store, range(1, 8), 32) == 7
    files = sorted((tmp_path / "payloads" / str(SMALL.block_bytes)).iterdir())
    assert len(files) > 1
    files[0].unlink()
    if damage == "directory":
        files[0].mkdir()
    else:
        os.symlink(files[0].name, files[0])
    with open_store(tmp_path, host_bytes=4 * MIB) as store:
        assert f"event=slab_left_alone path={files[0]}" in caplog.text
        counters = store.status().counters
        assert counters["unopened_files"] == 1
        assert counters["lost_payloads"] > 0
        assert store.status().disk.blocks > 0
        assert documents(store, range(1, 8), 32) == 7  # all heal
        assert store.check() == []
    assert files[0].is_symlink() or files[0].is_dir()


@in_loop
async def test_a_bad_place_costs_no_ticket_and_no_moment_of_host_only(tmp_path):
    it = Pipes(tmp_path)
    it.faults.inner = it.faults.open_slab
    it.faults.bad_places = [(SLAB, 5 * SLOT_OF_SMALL, 5 * SLOT_OF_SMALL + 1)]
    async with it:
        assert await it.store.durable(await it.put(it.hashes(1, 40)))
        assert it.store.counters.get("write_failures", 0) == 0
        assert it.store.status().counters["bad_places"] == 1
