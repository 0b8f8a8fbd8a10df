"""The write pipeline: batches overlap, and what fails in one of them spoils no other."""

import asyncio

import pytest

from kvstore.hashing import ROOT
from kvstore.observer import Departure
from kvstore.prefix_index import NONE
from kvstore.settings import MIB
from kvstore.units import UnitKind, UnitMark
from tests.kvstore.blocks import SMALL, end_of, fill, in_loop, until
from tests.kvstore.test_writeback import Bench

pytestmark = pytest.mark.usefixtures("payload_kind")

BATCH = 32


class Pipes(Bench):
    """A store whose arena holds several batches, with a gate before the catalogue too."""

    def __init__(self, path, **changes):
        super().__init__(path, **({"host_bytes": 4 * MIB} | changes))

    async def __aenter__(self):
        await super().__aenter__()
        self.store._disk.catalog = self.faults.guard(self.store._disk.catalog)
        return self

    async def __aexit__(self, *raised):
        self.faults.catalog_gate.set()
        await super().__aexit__(*raised)

    async def fill_two(self):
        """Two batches under way: the first is being named, the second written; their tickets and hashes."""
        self.faults.catalog_gate.clear()
        hashes = self.hashes(1, 2 * BATCH)
        first = await self.put(hashes[:BATCH])
        await until(lambda: self.faults.commits == 1)
        self.faults.write_gate.clear()
        second = await self.put(hashes[BATCH:], hashes[BATCH - 1])
        await until(lambda: self.faults.writes == 2)
        return first, second, hashes

    def on_disk(self, hashes):
        index = self.store._index
        return [index.place[index.find(block)] != NONE for block in hashes]

    async def settled(self):
        await until(lambda: self.store.status().mode == "ok" and not self.store.status().dirty_blocks)

    def payload_count(self):
        """Payloads that the files hold, whether the catalogue names them or not."""
        payloads = self.store._disk._payloads[SMALL.block_bytes]
        return len(self.faults.written - payloads.missing(list(self.faults.written)))


async def reopened_hit(path, hashes):
    """Blocks of a chain that are hit after a restart, all of them read and checked."""
    async with Pipes(path) as it:
        hit = it.hit(hashes)
        assert await it.load(hashes[:hit]) == hit
        return hit


@in_loop
async def test_a_batch_is_written_while_the_one_before_is_named(tmp_path):
    async with Pipes(tmp_path) as it:
        first, second, hashes = await it.fill_two()
        waiting = [asyncio.create_task(it.store.durable(ticket)) for ticket in (first, second)]
        assert it.store.status().dirty_blocks == 2 * BATCH
        it.faults.write_gate.set()
        await until(lambda: not it.store._writer._pipeline.writing)
        assert not any(it.on_disk(hashes))  # written, and nothing of it is named before the first is
        assert not any(task.done() for task in waiting)
        it.faults.catalog_gate.set()
        assert await asyncio.gather(*waiting) == [True, True]
        assert all(it.on_disk(hashes))
    assert await reopened_hit(tmp_path, hashes) == 2 * BATCH


@in_loop
async def test_a_write_that_fails_leaves_the_batch_that_is_being_named_alone(tmp_path):
    async with Pipes(tmp_path) as it:
        first, second, hashes = await it.fill_two()
        waiting = asyncio.create_task(it.store.durable(first))
        it.faults.fail_writes = True
        it.faults.write_gate.set()
        it.faults.catalog_gate.set()
        assert await waiting
        assert not await it.store.durable(second)
        assert it.on_disk(hashes) == [True] * BATCH + [False] * BATCH
        it.faults.fail_writes = False
        await it.settled()
        assert all(it.on_disk(hashes))
        assert it.payload_count() == 2 * BATCH
    assert await reopened_hit(tmp_path, hashes) == 2 * BATCH


@in_loop
async def test_a_batch_that_is_not_named_takes_the_one_behind_it_along(tmp_path):
    """Else blocks would be in the catalogue without those that they stand on."""
    async with Pipes(tmp_path) as it:
        first, second, hashes = await it.fill_two()
        it.faults.fail_commits = 1
        it.faults.write_gate.set()
        await until(lambda: not it.store._writer._pipeline.writing)
        it.faults.catalog_gate.set()
        assert not await it.store.durable(first)
        assert not await it.store.durable(second)
        assert not any(it.on_disk(hashes))
        assert it.store.counters["write_failures"] == 1
        assert it.hit(hashes) == 2 * BATCH  # still served, from the arena
        await it.settled()
        assert all(it.on_disk(hashes))
        assert it.payload_count() == 2 * BATCH  # what was written and not named is free again
        index = it.store._index
        assert all(index.holds[row] == 0 for row in index)
        assert {it.store.arena.holders(index.slot[row]) for row in index} == {0}
    assert await reopened_hit(tmp_path, hashes) == 2 * BATCH


@in_loop
async def test_batches_that_failed_are_written_again_in_their_order(tmp_path):
    async with Pipes(tmp_path) as it:
        _, _, hashes = await it.fill_two()
        it.faults.fail_commits = 1
        it.faults.write_gate.set()
        it.faults.catalog_gate.set()
        await until(lambda: it.store.status().mode == "host_only" and not it.store._writer._pipeline.batches)
        index = it.store._index
        assert [index.hashes[row] for row in it.store._writer._dirty] == hashes
        await it.settled()


@in_loop
async def test_closing_in_mid_pipeline_makes_both_batches_durable(tmp_path):
    it = Pipes(tmp_path)
    await it.__aenter__()
    first, second, hashes = await it.fill_two()
    waiting = [asyncio.create_task(it.store.durable(ticket)) for ticket in (first, second)]
    closing = asyncio.create_task(it.store.close())
    await until(lambda: it.store._closing)
    it.faults.write_gate.set()
    it.faults.catalog_gate.set()
    assert await closing
    assert await asyncio.gather(*waiting) == [True, True]
    assert await reopened_hit(tmp_path, hashes) == 2 * BATCH


@in_loop
async def test_closing_over_a_pipeline_that_fails_ends_and_keeps_what_was_named(tmp_path):
    it = Pipes(tmp_path, drain_seconds=0.2)
    await it.__aenter__()
    first, second, hashes = await it.fill_two()
    waiting = [asyncio.create_task(it.store.durable(ticket)) for ticket in (first, second)]
    it.faults.fail_writes = True
    closing = asyncio.create_task(it.store.close())
    await until(lambda: it.store._closing)
    it.faults.catalog_gate.set()
    it.faults.write_gate.set()
    assert not await closing
    assert await asyncio.gather(*waiting) == [True, False]
    async with Pipes(tmp_path) as it:
        assert it.store.status().disk.blocks == BATCH
        assert await it.load(hashes) == BATCH


@in_loop
async def test_what_the_catalogue_could_not_forget_is_freed_by_a_later_batch_and_not_before(tmp_path):
    async with Pipes(tmp_path) as it:
        kept, new = it.hashes(1, 4), it.hashes(2, 4)
        assert await it.store.durable(await it.put(kept))
        it.faults.fail_commits = 1
        it.store._writer.free(it.store._index.find(kept[-1]), Departure.DELETED)
        gone = it.store._writer.gone()
        assert not await it.store.durable(await it.put(new))
        assert it.payload_count() == 4
        assert not gone.done()
        await gone
        await it.settled()
        assert it.payload_count() == 7
    assert await reopened_hit(tmp_path, new) == 4
    assert await reopened_hit(tmp_path, kept) == 0  # its unit ended at the block that left


@in_loop
async def test_nothing_under_way_is_evicted_from_arena_or_disk(tmp_path):
    async with Pipes(tmp_path, host_bytes=MIB) as it:  # 85 slots
        _, _, hashes = await it.fill_two()
        it.store._host.dirty_evictable = True
        lease = it.store.reserve(it.worker, it.namespace, ROOT, it.hashes(2, 42), 0).lease
        assert not it.store._writer.room.make(SMALL.block_bytes, 1 << 60)  # all that may go
        assert await it.load(hashes) == 2 * BATCH
        it.store.release(it.worker, lease)
        it.store._host.dirty_evictable = False
        it.faults.write_gate.set()
        it.faults.catalog_gate.set()
        await it.settled()
        assert all(it.on_disk(hashes))


@in_loop
async def test_a_mark_made_in_mid_pipeline_goes_along_with_its_block(tmp_path):
    async with Pipes(tmp_path) as it:
        it.faults.write_gate.clear()
        hashes = it.hashes(1, 4)
        lease = await fill(it.store, it.worker, it.namespace, hashes)
        it.store.commit(it.worker, lease, hashes, [])
        await until(lambda: it.faults.writes == 1)
        ticket = it.store.commit(it.worker, lease, [], [UnitMark(hashes[-1], UnitKind.INTERVAL)])
        it.faults.write_gate.set()
        assert await it.store.durable(ticket)
        assert it.faults.commits == 1  # one transaction for both
    assert await reopened_hit(tmp_path, hashes) == 4


@in_loop
async def test_a_mark_on_a_block_that_is_being_named_follows_at_once(tmp_path):
    async with Pipes(tmp_path) as it:
        first, second, hashes = await it.fill_two()
        lease = it.store.reserve(it.other, it.namespace, ROOT, hashes[:1], 0).lease
        mark = it.store.commit(it.other, lease, [], end_of(hashes[:1], UnitKind.INTERVAL))
        it.faults.write_gate.set()
        it.faults.catalog_gate.set()
        assert await it.store.durable(mark)
        assert await it.store.durable(first)
        assert await it.store.durable(second)
    async with Pipes(tmp_path) as it:
        row = it.store._index.find(hashes[0])
        assert it.store._index.kinds[row] == UnitKind.INTERVAL


@in_loop
async def test_a_mark_that_could_not_be_written_is_written_again(tmp_path):
    async with Pipes(tmp_path) as it:
        hashes = it.hashes(1, 4)
        assert await it.store.durable(await it.put(hashes))
        it.faults.fail_commits = 1
        lease = it.store.reserve(it.worker, it.namespace, ROOT, hashes, 0).lease
        assert not await it.store.durable(it.store.commit(it.worker, lease, [], end_of(hashes[:2])))
        again = it.store.commit(it.worker, lease, [], end_of(hashes[:2]))
        assert await it.store.durable(again)
    async with Pipes(tmp_path) as it:
        assert it.store._index.kinds[it.store._index.find(hashes[1])] == UnitKind.REQUEST_END


@in_loop
async def test_a_batch_that_is_not_full_waits_until_the_disk_has_time(tmp_path):
    """So single blocks that come one by one are not written one by one."""
    async with Pipes(tmp_path) as it:
        it.faults.write_gate.clear()
        hashes = it.hashes(1, 12)
        await it.put(hashes[:1])
        await until(lambda: it.faults.writes == 1)
        for at in range(1, 12):
            ticket = await it.put(hashes[at : at + 1], hashes[at - 1])
            await until(lambda: not it.store._writer._work.is_set())  # it has seen the block
        assert len(it.store._writer._pipeline.batches) == 1
        it.faults.write_gate.set()
        assert await it.store.durable(ticket)
        assert it.faults.writes == 2
