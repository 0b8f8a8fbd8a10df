"""What has not been used for long, or was stored long ago, leaves HOST and DISK; what is held does not."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvstore.api import MissReason
from kvstore.errors import InvalidArgument
from kvstore.expiry import STEP_BLOCKS
from kvstore.hashing import ROOT, block_hashes
from kvstore.observer import Departure
from kvstore.prefix_index import NONE
from kvstore.settings import MIB
from tests.kvstore.blocks import (
    DAY,
    Conversation,
    end_of,
    in_loop,
    later,
    load_chain,
    open_store,
    settings,
    store_chain,
    tokens,
    until,
)
from tests.kvstore.test_writeback import Bench

A, B, C = (tokens(seed, 12) for seed in range(3))


def chain(worker: Conversation, ids, units=()) -> list[bytes]:
    """Store a chain of a prompt's blocks, with units at these depths and at its end."""
    hashes = block_hashes(worker.namespace, ids)
    marks = [mark for depth in (*units, len(hashes)) for mark in end_of(hashes[:depth])]
    assert store_chain(worker.store, worker.namespace, hashes, marks)
    return hashes


def used(store, block: bytes, seconds_ago: float) -> None:
    """As if a block had been used so long ago."""
    index = store._store._index
    index.used[index.find(block)] = time.time() - seconds_ago


def test_what_was_not_used_for_a_day_leaves_both_tiers_and_says_so(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        chain(worker, A)
        assert store.expire(time.time() + DAY - 60) == 0
        assert store.expire(time.time() + DAY + 60) == 12
        status = store.status()
        assert (status.disk.blocks, status.disk.used_bytes, status.host.used_bytes, status.units) == (
            0,
            0,
            0,
            0,
        )
        assert status.counters["expired_blocks"] == 12
        match = worker.match(A)
        assert (match.stored_blocks, match.reason) == (0, MissReason.EXPIRED)
        assert store.check() == []
    with open_store(tmp_path) as store:
        assert store.status().disk.blocks == 0
        assert Conversation(store).match(A).stored_blocks == 0


def test_an_idle_tail_leaves_and_what_others_use_stays(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        one = chain(worker, A[:512] + B, units=[8])
        other = chain(worker, A[:512] + C)
        for block in one[8:]:
            used(store, block, 2 * DAY)
        assert store.expire(time.time()) == 12
        assert load_chain(store, worker.namespace, other) == 20
        assert worker.match(A[:512] + B).blocks == 8
        assert store.check() == []


def test_a_use_keeps_a_whole_prefix(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        hashes = chain(worker, A)
        for block in hashes:
            used(store, block, 2 * DAY)
        load_chain(store, worker.namespace, hashes)
        assert store.expire(time.time()) == 0


def test_a_block_that_stands_on_an_idle_one_keeps_it(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        hashes = chain(worker, A, units=[6])
        for block in hashes[:6]:
            used(store, block, 2 * DAY)
        assert store.expire(time.time()) == 0
        assert load_chain(store, worker.namespace, hashes) == 12


def test_what_a_lease_holds_stays_until_it_is_released(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        hashes = chain(worker, A)
        with store.load(worker.namespace, hashes) as load:
            batches = iter(load)
            next(batches)
            assert store.expire(time.time() + 2 * DAY) == 0
            assert sum(len(batch) for batch in batches) < 12
        assert store.expire(time.time() + 2 * DAY) == 12
        lease = store.reserve(worker.namespace, ROOT, hashes).lease
        assert store.expire(time.time() + 3 * DAY) == 0
        store.release(lease)
        assert store.check() == []


def test_the_last_use_survives_a_restart(tmp_path):
    """A block is recorded once; its uses since are noted with the units."""
    used, clock = time.time() + 5 * DAY, later(0)
    with open_store(tmp_path, clock=clock) as store:
        worker = Conversation(store)
        chain(worker, A)
        hashes = chain(worker, B)
        clock.passed = 5 * DAY
        load_chain(store, worker.namespace, hashes)
    with open_store(tmp_path, clock=later(5 * DAY)) as store:
        assert store.expire(used + DAY - 60) == 12
        assert store.status().disk.blocks == 12
    with open_store(tmp_path, clock=later(5 * DAY)) as store:
        assert store.expire(used + DAY + 60) == 12


def test_uses_are_written_down_together_and_not_one_by_one(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        hashes = chain(worker, A, units=[4, 8])
        before = {unit.hash: unit for unit in records(store)}
        for depth in (4, 8, 12):
            load_chain(store, worker.namespace, hashes[:depth])
        assert {unit.hash: unit for unit in records(store)} == before
        store._call(store._store._writer.keep_uses)
        store.durable(store.commit(store.reserve(worker.namespace, ROOT, hashes).lease, [], end_of(hashes)))
        assert all(unit.used > before[unit.hash].used and unit.hits == 1 for unit in records(store))


def records(store):
    return list(store._store._disk.catalog.units())


def test_a_store_that_asks_for_what_is_there_is_a_use_of_the_unit(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        hashes = chain(worker, A)
        index = store._store._index
        use = index.units[index.find(hashes[-1])]
        use.used = 0.0
        chain(worker, A)
        assert use.used == pytest.approx(time.time(), abs=60)
        assert use.hits == 0


def test_an_old_block_goes_with_all_that_stands_on_it_however_often_it_is_used(tmp_path):
    with open_store(tmp_path, ttl_seconds=0, max_age_seconds=7 * DAY) as store:
        worker = Conversation(store)
        hashes, other = chain(worker, A), chain(worker, B)
        index = store._store._index
        for block in hashes[:4]:
            index.created[index.find(block)] -= int(8 * DAY)
        load_chain(store, worker.namespace, hashes)
        assert store.expire(time.time()) == 12
        assert worker.match(A).reason is MissReason.EXPIRED
        assert load_chain(store, worker.namespace, other) == 12
        assert store.expire(time.time() + 6 * DAY) == 0
        assert chain(worker, A) == hashes
        assert store.expire(time.time() + 6 * DAY) == 0  # stored anew
        assert store.expire(time.time() + 8 * DAY) == 24
        assert store.check() == []


def test_the_age_survives_a_restart_and_uses(tmp_path):
    with open_store(tmp_path, max_age_seconds=DAY) as store:
        worker = Conversation(store)
        hashes = chain(worker, A)
        index = store._store._index
        created = [index.created[index.find(block)] for block in hashes]
    with open_store(tmp_path, max_age_seconds=DAY) as store:
        index = store._store._index
        assert [index.created[index.find(block)] for block in hashes] == created
        load_chain(store, worker.namespace, hashes)
        assert store.expire(time.time() + DAY + 60) == 12


def test_nothing_expires_without_limits(tmp_path):
    with open_store(tmp_path, ttl_seconds=0) as store:
        chain(Conversation(store), A)
        assert store.expire(time.time() + 1000 * DAY) == 0


@in_loop
async def test_expiry_goes_in_steps_between_which_others_are_served(tmp_path):
    async with Bench(tmp_path, host_bytes=16 * MIB, disk_bytes=32 * MIB) as it:
        hashes = it.hashes(1, 2 * STEP_BLOCKS + 10)
        await it.store.durable(await it.put(hashes))
        it.faults.free_gate.clear()
        sweep = asyncio.ensure_future(it.store.keeping.expire(time.time() + 2 * DAY))
        await until(lambda: it.faults.free_gate.arrived == 1)
        counters = it.store.counters
        assert counters["expired_blocks"] == STEP_BLOCKS  # the next step waits until these have left the disk
        other = it.hashes(2, 4)
        ticket = await it.put(other)
        assert it.hit(other) == 4
        it.faults.free_gate.set()
        assert await sweep == len(hashes)
        assert await it.store.durable(ticket)
        assert it.store.status().disk.blocks == 4


@in_loop
async def test_a_block_only_the_arena_has_expires_too(tmp_path):
    async with Bench(tmp_path) as it:
        it.faults.fail_writes = True
        hashes = it.hashes(1, 4)
        ticket = await it.put(hashes)
        assert not await it.store.durable(ticket)
        index = it.store._index
        assert (
            await it.store.keeping.expire(time.time() + 2 * DAY) == 0
        )  # it is still to be written, and held for that
        it.faults.fail_writes = False
        await until(lambda: index.place[index.find(hashes[-1])] != NONE)
        assert await it.store.keeping.expire(time.time() + 2 * DAY) == 4


def test_departures_are_told_by_cause(tmp_path):
    told = []
    with open_store(tmp_path) as store:
        writer = store._store._writer
        before, writer.on_left = writer.on_left, lambda row, why: (told.append(why), before(row, why))
        chain(Conversation(store), A)
        store.expire(time.time() + 2 * DAY)
    assert set(told) == {Departure.EXPIRED}


@pytest.mark.parametrize(
    "wrong", [{"ttl_seconds": 0.5}, {"max_age_seconds": -1}, {"ttl_seconds": float("inf")}]
)
def test_a_limit_that_is_none_is_refused(tmp_path, wrong):
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        settings(tmp_path, **wrong)
