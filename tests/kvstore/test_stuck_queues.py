"""Nothing that cannot be written, freed or looked for holds up what stands behind it."""

import asyncio
import logging

import pytest

from kvstore.hashing import block_hashes
from kvstore.layout import LatentLayout
from kvstore.namespace import Namespace
from kvstore.observer import Departure
from kvstore.settings import MIB
from kvstore.slots import SlotState
from tests.kvstore.blocks import content, end_of, in_loop, put, tokens, until
from tests.kvstore.test_pipeline import Pipes
from tests.kvstore.test_writeback import Bench

pytestmark = pytest.mark.usefixtures("payload_kind")

LARGE = LatentLayout(num_layers=64, latent_rank=32, rope_dim=16)


class Small(Bench):
    """A disk of 16 MiB under an arena of 32 MiB."""

    def __init__(self, path, **changes):
        super().__init__(path, **{"host_bytes": 32 * MIB, "disk_bytes": 16 * MIB} | changes)

    async def document(self, seed, blocks, namespace=None, chunk=8):
        """Store a chain in chunks, as a prompt comes, under one lease; hashes and the last ticket."""
        space = namespace or self.namespace
        hashes = block_hashes(space, tokens(seed, blocks))
        lease, parent = 0, b"\0" * 32
        for at in range(0, blocks, chunk):
            part = hashes[at : at + chunk]
            answer = self.store.reserve(self.worker, space, parent, part, lease)
            lease, parent = answer.lease, part[-1]
            size = self.store.space(space).block_bytes
            for block, offset in zip(part, answer.offsets, strict=True):
                self.store.arena.memory[offset : offset + size] = content(block, size)
            ticket = self.store.commit(
                self.worker, lease, part, end_of(hashes) if parent == hashes[-1] else []
            )
        self.store.release(self.worker, lease)
        return hashes, ticket

    async def settled(self):
        await until(lambda: not self.store.status().dirty_blocks)

    def sound(self):
        index = self.store._index
        assert self.store.check() == []
        assert all(index.holds[row] == 0 for row in index)
        assert self.store.held().slots == 0


@in_loop
async def test_a_document_larger_than_the_disk_ends_the_writing_of_no_other(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        async with Small(tmp_path) as it:
            large, ticket = await it.document(1, 1400)
            small, theirs = await it.document(2, 16)
            assert not await it.store.durable(ticket)
            assert await it.store.durable(theirs)
            for seed in range(3, 8):
                _, theirs = await it.document(seed, 16)
                assert await it.store.durable(theirs)
            status = it.store.status()
            assert (status.mode, status.dirty_blocks) == ("ok", 0)
            assert status.counters["disk_declined_blocks"] > 0
            assert it.hit(small) == 16
            it.sound()
        assert caplog.text.count("event=disk_declined_blocks") == 1
        assert "host_only" not in caplog.text
    async with Small(tmp_path) as it:
        assert it.hit(small) == 16
        assert await it.load(small) == 16
        assert it.hit(large) < 1400


@in_loop
async def test_the_drain_writes_what_came_after_a_document_that_does_not_fit(tmp_path):
    it = Small(tmp_path)
    await it.__aenter__()
    await it.document(1, 1400)
    small, _ = await it.document(2, 16)
    assert await it.store.close()
    async with Small(tmp_path) as it:
        assert await it.load(small) == 16


@in_loop
async def test_what_is_declined_keeps_nothing_on_the_disk(tmp_path):
    """Blocks in memory only stand on the written part of their document: that leaves all the same."""
    async with Small(tmp_path) as it:
        await it.document(1, 1400)
        await it.settled()
        assert it.store.arena.count(SlotState.LOOSE) > 0
        for seed in range(2, 40):
            _, ticket = await it.document(seed, 40)
            assert await it.store.durable(ticket)
        assert it.store.counters.get("write_failures", 0) == 0
        it.sound()


@in_loop
async def test_two_half_written_documents_do_not_wait_for_each_others_room(tmp_path):
    async with Small(tmp_path) as it:
        it.faults.write_gate.clear()
        one, other = (block_hashes(it.namespace, tokens(seed, 700)) for seed in (1, 2))
        leases, parents, last = [0, 0], [b"\0" * 32] * 2, [0, 0]
        for at in range(0, 700, 10):
            for which, hashes in enumerate((one, other)):
                part = hashes[at : at + 10]
                answer = it.store.reserve(it.worker, it.namespace, parents[which], part, leases[which])
                leases[which], parents[which] = answer.lease, part[-1]
                last[which] = it.store.commit(it.worker, answer.lease, part, [])
        for lease in leases:
            it.store.release(it.worker, lease)
        it.faults.write_gate.set()
        ends = [await it.store.durable(ticket) for ticket in last]
        assert sorted(ends) == [False, True]
        await it.settled()
        assert it.store.status().mode == "ok"
        _, ticket = await it.document(3, 16)
        assert await it.store.durable(ticket)
        it.sound()


@in_loop
async def test_what_finds_no_room_now_waits_beside_a_layout_that_does(tmp_path):
    """Room that a lease holds: smaller blocks still fit, and the larger ones follow once it is over."""
    async with Small(tmp_path, host_bytes=160 * MIB) as it:  # an extent for each layout
        wide = await it.store.open_namespace(Namespace(layout=LARGE))
        hashes, ticket = await it.document(1, 900)
        assert await it.store.durable(ticket)
        stream = it.store.load(it.other, it.namespace, hashes, 0)
        waiting, large = await it.document(2, 24, wide, chunk=4)
        assert not await it.store.durable(large)
        assert it.store.status().mode == "host_only"
        _, ticket = await it.document(3, 16)
        assert await it.store.durable(ticket)
        stream.close(returned=True)
        await until(lambda: it.store.status().mode == "ok" and not it.store.status().dirty_blocks)
        assert it.store._index.place[it.store._index.find(waiting[-1])] != -1
        assert it.store.counters.get("disk_declined_blocks", 0) == 0
        it.sound()


@in_loop
async def test_a_document_that_waits_half_written_for_what_is_leased_gives_way_to_others(tmp_path):
    async with Small(tmp_path) as it:
        leased, ticket = await it.document(1, 500)
        assert await it.store.durable(ticket)
        stream = it.store.load(it.other, it.namespace, leased, 0)
        _, ticket = await it.document(2, 600)  # fits, if that were not leased
        assert not await it.store.durable(ticket)
        small, _ = await it.document(3, 16)
        await it.settled()
        assert it.store._index.place[it.store._index.find(small[-1])] != -1
        assert it.store.counters["disk_declined_blocks"] > 0
        stream.close(returned=True)


@in_loop
async def test_blocks_that_left_memory_unwritten_are_queued_no_more(tmp_path):
    """The queue is no larger than the arena, and its number is true, however long the disk fails."""
    async with Bench(tmp_path) as it:
        it.faults.fail_writes = True
        first = await it.put(it.hashes(0, 30))
        assert not await it.store.durable(first)
        slots = it.store.arena.capacity(0)
        for seed in range(1, 40):
            await it.put(it.hashes(seed, 30))
            await asyncio.sleep(0)
            assert it.store.status().dirty_blocks <= slots
            assert len(it.store._index) <= 2 * slots
        index = it.store._index
        dirty = sum(index.slot[row] != -1 for row in index)
        assert it.store.status().dirty_blocks == dirty
        it.faults.fail_writes = False
        await until(lambda: it.store.status().mode == "ok" and not it.store.status().dirty_blocks)
        assert it.store.check() == []
        assert all(index.holds[row] == 0 for row in index)


class Poisoned(Pipes):
    """A store in which some payloads can never be written."""

    def poison(self, *blocks):
        index = self.store._index
        for block in blocks:
            slot = index.slot[index.find(block)]
            self.faults.poison.append(bytes(self.store.arena.view(slot)))


@in_loop
async def test_one_block_that_can_never_be_written_costs_only_those_that_stand_on_it(tmp_path, caplog):
    async with Poisoned(tmp_path) as it:
        it.faults.write_gate.clear()
        chains = [it.hashes(seed, 8) for seed in range(1, 6)]
        for hashes in chains:
            await it.put(hashes)
        it.poison(chains[1][3])
        it.faults.write_gate.set()
        late = it.hashes(9, 8)
        await it.put(late)
        await until(lambda: not it.store.status().dirty_blocks)
        assert it.store.status().mode == "ok"
        assert it.on_disk(chains[1]) == [True] * 3 + [False] * 5
        for hashes in (chains[0], *chains[2:], late):
            assert all(it.on_disk(hashes))
        assert it.store.counters["unwritable_blocks"] == 5
        failures = it.store.counters["write_failures"]
        assert caplog.text.count("event=unwritable_blocks") == 1
        assert await it.load(chains[1]) == 8
        await until(lambda: not it.store.status().dirty_blocks)
        assert it.store.counters["write_failures"] == failures  # it is not tried whenever it is hit
        assert it.store.status().mode == "ok"
        assert it.store.counters["unwritable_blocks"] >= 5
        assert it.store.check() == []


@in_loop
async def test_a_failing_layout_holds_up_no_other(tmp_path):
    async with Pipes(tmp_path, host_bytes=160 * MIB) as it:  # an extent for each layout
        wide = await it.store.open_namespace(Namespace(layout=LARGE))
        it.faults.fail_sizes = {LARGE.block_bytes}
        theirs = block_hashes(wide, tokens(1, 2))
        assert not await it.store.durable(await put(it.store, it.other, wide, theirs))
        for seed in range(2, 6):
            assert await it.store.durable(await it.put(it.hashes(seed, 8)))
        it.faults.fail_sizes = set()
        await it.settled()
        assert all(it.on_disk(theirs))


@in_loop
async def test_what_can_not_be_freed_holds_up_only_the_same_blocks(tmp_path):
    async with Pipes(tmp_path) as it:
        gone = it.hashes(1, 4)
        assert await it.store.durable(await it.put(gone))
        it.faults.fail_frees = True
        for block in reversed(gone):
            it.store._writer.free(it.store._index.find(block), Departure.DELETED)
        left = it.store._writer.gone()
        await until(lambda: it.store.counters["write_failures"] > 0)
        for seed in range(2, 6):
            assert await it.store.durable(await it.put(it.hashes(seed, 8)))
        again = await it.put(gone)
        assert not await it.store.durable(again)
        assert not left.done()
        it.faults.fail_frees = False
        await left
        await it.settled()
        assert all(it.on_disk(gone))
        assert it.payload_count() == 4 + 4 * 8
    async with Pipes(tmp_path) as it:
        assert await it.load(gone) == 4


@in_loop
async def test_payloads_that_cannot_be_listed_hold_up_no_writing(tmp_path):
    async with Pipes(tmp_path) as it:
        hashes = it.hashes(1, 4)
        assert await it.store.durable(await it.put(hashes))
        it.faults.fail_listing = True
        it.store._writer.corrupt(it.store._index.find(hashes[-1]))
        assert await it.store.durable(await it.put(it.hashes(2, 8)))
        assert it.store.status().mode == "ok"
        await until(lambda: it.store.counters["read_errors"] > 0)
        it.faults.fail_listing = False
        await until(lambda: not it.store._writer._suspects)


@in_loop
async def test_a_quota_evicts_once_for_all_that_is_needed(tmp_path):
    """Not block by block, with a look at the whole index for each."""
    quotas = {"tenant_quotas": {"default": 200 * 16384}}
    async with Bench(tmp_path, host_bytes=8 * MIB, **quotas) as it:
        for seed in range(1, 5):
            assert await it.store.durable(await it.put(it.hashes(seed, 40)))
        evictor = it.store._writer.room._evictor
        looks, whole = [], evictor._leaves
        evictor._leaves = lambda among: looks.append(among) or whole(among)
        lease = it.store.load(it.other, it.namespace, it.hashes(1, 40), 0)
        await it.put(it.hashes(9, 240))
        await until(lambda: not it.store.status().dirty_blocks)
        lease.close(returned=True)
        assert len(looks) <= 2 * (240 // 32 + 1)
        assert it.store.counters["quota_declined_blocks"] > 0


@in_loop
async def test_pins_end_while_nothing_can_leave_the_disk(tmp_path):
    async with Pipes(tmp_path, ttl_seconds=1.0) as it:
        kept, gone = it.hashes(1, 4), it.hashes(2, 4)
        for hashes in (kept, gone):
            assert await it.store.durable(await it.put(hashes))
        it.faults.fail_frees = True
        pin = await it.store.keeping.curator.pin(kept[-1].hex(), 1.0)
        await until(lambda: it.store.counters["expired_blocks"] >= 4)  # waits for them to leave
        await until(lambda: pin.handle not in it.store.keeping._pins._pins)
        assert it.store.counters["write_failures"] > 0
        it.faults.fail_frees = False
