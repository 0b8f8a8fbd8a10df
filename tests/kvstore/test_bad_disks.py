"""Disks that lie, tear and delay, and races that gates force: never a wrong byte, and all of it passes."""

import pytest

from kvstore.hashing import ROOT, block_hashes
from kvstore.namespace import Namespace
from kvstore.store import Store
from tests.kvstore.blocks import (
    DEADLINE,
    SMALL,
    Conversation,
    content,
    end_of,
    faulty,
    in_loop,
    load_chain,
    open_store,
    put,
    settings,
    store_chain,
    stored_again,
    tokens,
    until,
)

pytestmark = pytest.mark.usefixtures("payload_kind")

BLOCKS = 8


def stored(store, seed=1):
    worker = Conversation(store)
    hashes = block_hashes(worker.namespace, tokens(seed, BLOCKS))
    assert store_chain(store, worker.namespace, hashes)
    return worker.namespace, hashes


def test_a_disk_that_lies_costs_the_block_and_not_the_truth(tmp_path):
    faults = faulty()
    with open_store(tmp_path, faults) as store:
        namespace, hashes = stored(store)
    with open_store(tmp_path, faults) as store:
        faults.lie_in_reads = True
        assert load_chain(store, namespace, hashes) == 0
        assert store.status().counters["checksum_failures"] >= 1
        faults.lie_in_reads = False
        assert stored_again(store, namespace, hashes)
        assert store.check() == []


def test_a_write_that_was_torn_unnoticed_is_a_miss_once_it_is_read(tmp_path):
    faults = faulty()
    with open_store(tmp_path, faults) as store:
        faults.tear_writes = True
        namespace, hashes = stored(store)
        assert load_chain(store, namespace, hashes) == BLOCKS  # the arena has them
        faults.tear_writes = False
    with open_store(tmp_path, faults) as store:
        assert load_chain(store, namespace, hashes) == 0
        assert stored_again(store, namespace, hashes)
    with open_store(tmp_path, faults) as store:
        assert load_chain(store, namespace, hashes) == BLOCKS


def test_a_slow_disk_ends_a_load_at_its_deadline_and_serves_the_next(tmp_path):
    faults = faulty()
    with open_store(tmp_path, faults) as store:
        namespace, hashes = stored(store)
    with open_store(tmp_path, faults, readers=1) as store:
        faults.delay = 0.3
        with store.load(namespace, hashes, timeout=0.01) as load:
            assert list(load) == []
            assert load.short == 0
        faults.delay = 0.0
        assert load_chain(store, namespace, hashes) == BLOCKS
        assert store.check() == []


@in_loop
async def test_what_is_durable_but_not_named_yet_is_neither_promised_nor_lost(tmp_path):
    faults = faulty()
    store = await Store.open(settings(tmp_path), faults.open)
    namespace = await store.open_namespace(Namespace(layout=SMALL))
    worker = store.connect(b"w" * 16, mapped=True)
    hashes = block_hashes(namespace, tokens(1, BLOCKS))
    faults.written_gate.clear()
    ticket = await put(store, worker, namespace, hashes)
    await until(lambda: faults.written_gate.arrived == 1)
    match = store.match(namespace, hashes, 64 * BLOCKS + 1, align=64, store=False)
    assert (match.blocks, match.host_blocks, match.disk_blocks) == (BLOCKS, BLOCKS, 0)
    assert store.status().disk.blocks == 0
    assert store.check() == []
    faults.written_gate.set()
    assert await store.durable(ticket)
    assert store.status().disk.blocks == BLOCKS
    await store.close()


def test_a_block_that_is_stored_again_while_its_old_place_is_freed_is_whole(tmp_path):
    faults = faulty()
    with open_store(tmp_path, faults) as store:
        namespace, hashes = stored(store)
    with open_store(tmp_path, faults) as store:
        faults.lie_in_reads = True
        faults.free_gate.clear()
        assert load_chain(store, namespace, hashes) == 0
        while store.status().counters.get("checksum_failures", 0) < BLOCKS:
            pass  # reads ahead of the one that failed are still under way
        faults.lie_in_reads = False
        assert faults.free_gate.await_arrivals(1, DEADLINE)  # forgotten by the catalogue, still in its place
        answer = store.reserve(namespace, ROOT, hashes)
        for block in answer.blocks:
            block.data[:] = content(block.hash, SMALL.block_bytes)
        ticket = store.commit(answer.lease, hashes, end_of(hashes))
        faults.free_gate.set()
        assert store.durable(ticket)
        store.release(answer.lease)
        assert store.check() == []
    with open_store(tmp_path) as store:
        assert load_chain(store, namespace, hashes) == BLOCKS
