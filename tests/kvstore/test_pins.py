"""A pinned unit stays, whatever else comes, until its pin is dropped or has expired."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvstore.errors import DiskError, InvalidArgument, PinLimit, PinUnknown, UnitPinned, UnitUnknown
from kvstore.hashing import block_hashes
from kvstore.observer import Departure
from tests.kvstore.blocks import (
    Conversation,
    in_loop,
    load_chain,
    open_store,
    store_chain,
    tokens,
    until,
)
from tests.kvstore.test_expiry import DAY, chain
from tests.kvstore.test_writeback import Bench

A, B, C = (tokens(seed, 12) for seed in range(3))


def pin(store, block: bytes, seconds: float = 7 * DAY):
    return store.curate(lambda it: it.pin(block.hex(), seconds))


def crowd(worker: Conversation) -> None:
    """Store more than the disk has room for."""
    for seed in range(10, 34):
        store_chain(worker.store, worker.namespace, block_hashes(worker.namespace, tokens(seed, 50)))
    assert worker.store.status().counters["disk_evicted_blocks"] > 0


def test_a_pinned_unit_is_neither_evicted_nor_expired(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        hashes, other = chain(worker, A), chain(worker, B)
        made = pin(store, hashes[-1])
        crowd(worker)
        assert load_chain(store, worker.namespace, other) == 0
        assert load_chain(store, worker.namespace, hashes) == 12
        store.expire(time.time() + 2 * DAY)
        assert store.status().disk.blocks == 12
        assert load_chain(store, worker.namespace, hashes) == 12
        assert store.check() == []
        store.expire(time.time() + 8 * DAY)
        assert store.status().disk.blocks == 0
        assert store.curate(lambda it: it.pins()) == []
        with pytest.raises(PinUnknown, match=made.handle):
            store.curate(lambda it: it.unpin(made.handle))


def test_a_pin_survives_a_restart_and_is_held_by_its_handle(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        hashes = chain(worker, A)
        made = pin(store, hashes[-1])
        assert len(made.handle) == 16
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        assert store.curate(lambda it: it.pins()) == [made]
        crowd(worker)
        assert load_chain(store, worker.namespace, hashes) == 12
        longer = store.curate(lambda it: it.extend(made.handle, 30 * DAY))
        assert longer.expires > made.expires
    with open_store(tmp_path) as store:
        assert store.curate(lambda it: it.pins()) == [longer]
        store.expire(time.time() + 8 * DAY)
        assert store.status().disk.blocks == 12
        store.curate(lambda it: it.unpin(made.handle))
        store.expire(time.time() + 8 * DAY)
        assert store.status().disk.blocks == 0
        assert store.check() == []
    with open_store(tmp_path) as store:
        assert store.curate(lambda it: it.pins()) == []


def test_a_unit_stays_until_the_last_of_its_pins_has_gone(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        short, long = chain(worker, A[:512], units=[4])[3], chain(worker, A)[-1]
        pins = [pin(store, block) for block in (long, short, long)]
        for handle in (pins[0].handle, pins[1].handle):
            store.curate(lambda it, handle=handle: it.unpin(handle))
            assert store.check() == []
            assert store.expire(time.time() + 2 * DAY) == 0
        store.curate(lambda it: it.unpin(pins[2].handle))
        assert store.expire(time.time() + 2 * DAY) == 12


def test_pins_are_bounded_to_their_share_of_the_disk_and_shared_blocks_count_once(tmp_path):
    with open_store(tmp_path, pin_share=0.02) as store:  # about 19 blocks
        worker = Conversation(store)
        one, two, three = chain(worker, A[:512] + B[:256]), chain(worker, A[:512] + C[:256]), chain(worker, B)
        first = pin(store, one[-1])
        pin(store, one[-1])
        pin(store, two[-1])
        with pytest.raises(PinLimit, match="unpin others, or raise pin_share"):
            pin(store, three[-1])
        assert store.check() == []
        store.curate(lambda it: it.unpin(first.handle))
        with pytest.raises(PinLimit):
            pin(store, three[-1])
        for each in store.curate(lambda it: it.pins()):
            store.curate(lambda it, each=each: it.unpin(each.handle))
        pin(store, three[-1])
        assert store.check() == []


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_pin_without_an_end_is_refused(tmp_path, seconds):
    with open_store(tmp_path) as store:
        hashes = chain(Conversation(store), A)
        with pytest.raises(InvalidArgument, match="seconds"):
            pin(store, hashes[-1], seconds)
        assert store.curate(lambda it: it.pins()) == []


def test_a_pinned_unit_is_deleted_only_with_its_namespace(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        hashes = chain(worker, A, units=[4])
        made = pin(store, hashes[-1])
        with pytest.raises(UnitPinned, match=made.handle):
            store.curate(lambda it: it.delete_unit(hashes[-1].hex()))
        store.curate(lambda it: it.delete_unit(hashes[3].hex()))
        assert load_chain(store, worker.namespace, hashes) == 12
        assert store.curate(lambda it: it.pins(tenant="default")) == [made]
        assert store.curate(lambda it: it.pins(tenant="other")) == []
        store.curate(lambda it: it.delete_namespaces(tenant="default"))
        assert store.curate(lambda it: it.pins()) == []
        assert store.status().disk.blocks == 0
        assert store.check() == []
    with open_store(tmp_path) as store:
        assert store.curate(lambda it: it.pins()) == []


def test_a_pin_outlives_a_damaged_block_and_keeps_it_once_it_is_stored_again(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        hashes = chain(worker, A)
        made = pin(store, hashes[-1])
        index = store._store._index
        for block in (hashes[5], hashes[-1]):
            store._call(lambda block=block: store._store._writer.free(index.find(block), Departure.CORRUPT))
        assert store.check() == []
        with pytest.raises(UnitUnknown):
            pin(store, hashes[-1])
        chain(worker, A)
        assert store.expire(time.time() + 2 * DAY) == 0
        store.curate(lambda it: it.unpin(made.handle))
        assert store.expire(time.time() + 2 * DAY) == 12
        assert store.check() == []


def test_a_unit_that_is_not_whole_cannot_be_pinned(tmp_path):
    with open_store(tmp_path) as store:
        hashes = chain(Conversation(store), A)
        index = store._store._index
        store._call(lambda: store._store._writer.free(index.find(hashes[5]), Departure.CORRUPT))
        with pytest.raises(UnitUnknown, match="not whole"):
            pin(store, hashes[-1])
        assert store.check() == []


def test_pins_of_what_is_gone_are_dropped_at_the_next_start(tmp_path):
    with open_store(tmp_path) as store:
        hashes = chain(Conversation(store), A)
        pin(store, hashes[-1])
        index = store._store._index
        store._call(lambda: store._store._writer.free(index.find(hashes[-1]), Departure.CORRUPT))
    for _ in range(2):
        with open_store(tmp_path) as store:
            assert store.curate(lambda it: it.pins()) == []
            assert store.check() == []


@in_loop
async def test_a_pin_waits_until_all_of_the_unit_is_on_disk(tmp_path):
    async with Bench(tmp_path) as it:
        it.faults.write_gate.clear()
        hashes = it.hashes(1, 8)
        await it.put(hashes)
        pinning = asyncio.ensure_future(it.store.keeping.curator.pin(hashes[-1].hex(), DAY))
        await until(lambda: it.faults.writes == 1)
        assert not pinning.done()
        it.faults.write_gate.set()
        await pinning
        assert it.store.status().disk.blocks == 8


@in_loop
async def test_what_cannot_be_written_is_not_pinned(tmp_path):
    async with Bench(tmp_path) as it:
        it.faults.fail_writes = True
        hashes = it.hashes(1, 8)
        await it.put(hashes)
        with pytest.raises(DiskError, match="not pinned"):
            await it.store.keeping.curator.pin(hashes[-1].hex(), DAY)
        it.faults.fail_writes = False
        assert await it.store.durable(await it.put(it.hashes(2, 1)))
        it.store._disk.catalog = it.faults.guard(it.store._disk.catalog)
        it.faults.fail_commits = 1
        with pytest.raises(DiskError):
            await it.store.keeping.curator.pin(hashes[-1].hex(), DAY)
        assert await it.store.keeping.curator.pins() == []
        made = await it.store.keeping.curator.pin(hashes[-1].hex(), DAY)
        for change in (
            it.store.keeping.curator.unpin(made.handle),
            it.store.keeping.curator.extend(made.handle, 9 * DAY),
        ):
            it.faults.fail_commits = 1
            with pytest.raises(DiskError):
                await change
            assert await it.store.keeping.curator.pins() == [made]


@pytest.mark.parametrize("share", [-0.1, 0.81, float("nan")])
def test_a_share_that_is_none_is_refused(tmp_path, share):
    with pytest.raises(InvalidArgument, match="pin_share"):
        open_store(tmp_path, pin_share=share)


@in_loop
async def test_a_pin_that_is_dropped_while_it_is_extended_stays_dropped(tmp_path):
    async with Bench(tmp_path) as it:
        hashes = it.hashes(1, 4)
        assert await it.store.durable(await it.put(hashes))
        curator = it.store.keeping.curator
        pin = await curator.pin(hashes[-1].hex(), 60.0)
        dropped, extended = await asyncio.gather(
            curator.unpin(pin.handle), curator.extend(pin.handle, 600.0), return_exceptions=True
        )
        assert dropped is None
        assert isinstance(extended, PinUnknown)
        assert await curator.pins() == []
    async with Bench(tmp_path) as it:
        assert await it.store.keeping.curator.pins() == []
