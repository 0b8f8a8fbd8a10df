"""What comes between a check and its use: each pair of events is put in its order by a gate of the disk."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from kvstore.errors import KVStoreError, PinUnknown, UnitPinned, UnitUnknown
from kvstore.hashing import ROOT
from kvstore.observer import Departure
from kvstore.store import Store
from kvstore.units import UnitKind, UnitMark
from tests.kvstore.blocks import DAY, fill, in_loop, settings, until
from tests.kvstore.test_writeback import Bench

WEEK = 7 * DAY


def name(hashes) -> str:
    return hashes[-1].hex()


async def durable(it: Bench, seed: int = 1, blocks: int = 4):
    hashes = it.hashes(seed, blocks)
    assert await it.store.durable(await it.put(hashes))
    return hashes


async def turns(it: Bench) -> None:
    """Let whatever has begun come as far as it can: through the catalogue's thread and back."""
    for _ in range(3):
        await it.store._writer.record(int)


@asynccontextmanager
async def catalogue_busy(it: Bench):
    """The catalogue's one thread has something else to do, so what is asked of it waits, in its order."""
    free = threading.Event()
    busy = asyncio.ensure_future(it.store._writer.record(free.wait))
    try:
        yield
    finally:
        free.set()
        await busy


async def asked(call):
    """A task that has come as far as the catalogue, or as what it waits for before."""
    task = asyncio.ensure_future(outcome(call))
    for _ in range(10):
        await asyncio.sleep(0)
    return task


async def outcome(task):
    """What a task gave, or the store's error that it ended with."""
    try:
        return await task
    except KVStoreError as error:
        return error


async def pins_after_restart(it: Bench):
    await it.store.close()
    it.store = await Store.open(settings(it.path, **it.changes), it.faults.open)
    return await it.store.keeping.curator.pins()


# --- pins


@in_loop
async def test_a_unit_whose_block_is_being_filled_cannot_be_pinned_yet(tmp_path):
    async with Bench(tmp_path) as it:
        hashes = it.hashes(1, 4)
        filling = await fill(it.store, it.other, it.namespace, hashes)
        mine = it.store.reserve(it.worker, it.namespace, ROOT, hashes, 0)
        it.store.commit(it.worker, mine.lease, [], [UnitMark(hashes[-1], UnitKind.REQUEST_END)])
        with pytest.raises(UnitUnknown, match="a worker is storing a block of it; pin it after that"):
            await it.store.keeping.curator.pin(name(hashes), WEEK)
        it.store.commit(it.other, filling, hashes, [])
        assert (await it.store.keeping.curator.pin(name(hashes), WEEK)).unit == hashes[-1]


@in_loop
async def test_a_pin_that_is_extended_as_it_expires_is_kept_or_said_to_be_gone(tmp_path):
    async with Bench(tmp_path) as it:
        curator, hashes = it.store.keeping.curator, await durable(it)
        pin = await curator.pin(name(hashes), 60)
        async with catalogue_busy(it):
            extending = await asked(curator.extend(pin.handle, WEEK))
            expiring = await asked(it.store.keeping.expire(pin.expires + 1))
        longer = await extending
        await expiring
        assert await curator.pins() == [longer]
        assert await it.store.keeping.expire(pin.expires + 2 * DAY) == 0
        assert await pins_after_restart(it) == [longer]


@in_loop
async def test_a_pin_that_is_dropped_while_it_is_extended_stays_dropped(tmp_path):
    async with Bench(tmp_path) as it:
        curator, hashes = it.store.keeping.curator, await durable(it)
        pin = await curator.pin(name(hashes), 60)
        async with catalogue_busy(it):
            extending = await asked(curator.extend(pin.handle, WEEK))
            dropping = await asked(curator.unpin(pin.handle))
        assert (await extending).handle == pin.handle
        await dropping
        with pytest.raises(PinUnknown):
            await curator.extend(pin.handle, WEEK)
        assert await pins_after_restart(it) == []


@in_loop
async def test_a_handle_is_known_once_its_pin_is_noted(tmp_path):
    async with Bench(tmp_path) as it:
        curator, hashes = it.store.keeping.curator, await durable(it)
        async with catalogue_busy(it):
            pinning = await asked(curator.pin(name(hashes), WEEK))
            assert await curator.pins() == []
            assert it.store.held().rows == 1
        made = await pinning
        assert await curator.pins() == [made]


@in_loop
async def test_a_unit_that_is_pinned_while_it_is_deleted_is_one_of_both(tmp_path):
    async with Bench(tmp_path) as it:
        curator, hashes = it.store.keeping.curator, it.hashes(1, 4)
        it.faults.write_gate.clear()
        await it.put(hashes)
        it.store._writer.hurry()
        await until(lambda: it.faults.write_gate.arrived > 0)
        deleting = asyncio.ensure_future(outcome(curator.delete_unit(name(hashes))))
        await turns(it)  # it waits for the batch that carries the unit
        pinning = asyncio.ensure_future(outcome(curator.pin(name(hashes), WEEK)))
        await turns(it)
        it.faults.write_gate.set()
        deleted, pinned = await deleting, await pinning
        assert isinstance(deleted, UnitPinned)
        assert await curator.pins() == [pinned]
        assert it.hit(hashes) == 4


@in_loop
async def test_a_unit_deleted_with_its_namespace_while_it_is_pinned_leaves_no_pin(tmp_path):
    async with Bench(tmp_path) as it:
        curator, hashes = it.store.keeping.curator, await durable(it)
        digest = it.namespace.hex()
        async with catalogue_busy(it):
            deleting = await asked(curator.delete_namespaces(digest=digest))
            pinning = await asked(curator.pin(name(hashes), WEEK))
        assert (await deleting).blocks == 4
        assert isinstance(await pinning, UnitUnknown)
        assert await curator.pins() == []
        await durable(it)  # stored anew: nothing pins it
        assert list(it.store._disk.catalog.notes(b"pin/")) == []
        assert await pins_after_restart(it) == []


@in_loop
async def test_a_unit_deleted_with_its_namespace_while_it_is_written_to_be_pinned_leaves_no_pin(tmp_path):
    async with Bench(tmp_path) as it:
        curator, hashes = it.store.keeping.curator, it.hashes(1, 4)
        it.faults.write_gate.clear()
        await it.put(hashes)
        pinning = asyncio.ensure_future(outcome(curator.pin(name(hashes), WEEK)))
        await until(lambda: it.faults.write_gate.arrived > 0)
        deleting = asyncio.ensure_future(curator.delete_namespaces(digest=it.namespace.hex()))
        await turns(it)
        it.faults.write_gate.set()
        assert (await deleting).blocks == 4
        assert isinstance(await pinning, KVStoreError)
        assert await curator.pins() == []
        assert await pins_after_restart(it) == []


@pytest.mark.parametrize("verb", ["pin", "delete_unit"])
@in_loop
async def test_a_unit_that_leaves_before_the_work_on_it_begins_is_not_taken_for_another(tmp_path, verb):
    async with Bench(tmp_path) as it:
        curator, hashes = it.store.keeping.curator, await durable(it, 1, 1)
        row = it.store._index.find(hashes[-1])
        call = curator.pin(name(hashes), WEEK) if verb == "pin" else curator.delete_unit(name(hashes))
        working = asyncio.ensure_future(outcome(call))
        await asyncio.sleep(0)  # the call has been made, the work begins with the next turn
        it.store._writer.free(row, Departure.EXPIRED)
        other = it.hashes(2, 1)
        ticket = await it.put(other)  # its row is the one that became free
        assert it.store._index.find(other[-1]) == row
        assert isinstance(await working, UnitUnknown)
        assert await it.store.durable(ticket)
        assert it.hit(other) == 1


@in_loop
async def test_a_block_lost_while_its_unit_is_written_to_be_pinned_makes_it_unknown(tmp_path):
    async with Bench(tmp_path) as it:
        curator, hashes = it.store.keeping.curator, await durable(it)
        it.faults.write_gate.clear()
        longer = it.hashes(1, 8)
        lease = it.store.reserve(it.worker, it.namespace, ROOT, longer, 0).lease
        it.store.commit(it.worker, lease, longer[4:], [UnitMark(longer[-1], UnitKind.REQUEST_END)])
        pinning = asyncio.ensure_future(outcome(curator.pin(name(longer), WEEK)))
        await until(lambda: it.faults.write_gate.arrived > 0)
        it.store._writer.corrupt(it.store._index.find(hashes[1]))
        it.faults.write_gate.set()
        assert isinstance(await pinning, UnitUnknown)
        assert await curator.pins() == []
        it.store.release(it.worker, lease)


# --- deletion


@in_loop
async def test_two_deletions_of_a_namespace_come_one_after_the_other(tmp_path):
    """Else the second would go on, and take what is stored, when the first has said that all is gone."""
    async with Bench(tmp_path) as it:
        curator, hashes = it.store.keeping.curator, await durable(it)
        digest = it.namespace.hex()
        it.faults.free_gate.clear()
        first = asyncio.ensure_future(curator.delete_namespaces(digest=digest))
        await until(lambda: it.faults.free_gate.arrived == 1)
        second = asyncio.ensure_future(curator.delete_namespaces(digest=digest))
        await turns(it)
        assert it.match(hashes).epoch == 1
        it.faults.free_gate.set()
        assert ((await first).blocks, (await second).blocks) == (4, 0)
        assert it.match(hashes).epoch == 2
        assert await durable(it) == hashes
        assert it.hit(hashes) == 4
