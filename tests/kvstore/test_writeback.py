"""Write-behind: what a ticket promises, the disk's capacity, and HOST_ONLY."""

import asyncio
import logging

import pytest

from kvstore.api import MissReason, ReserveState
from kvstore.errors import TicketUnknown, Unavailable
from kvstore.hashing import ROOT, block_hashes
from kvstore.namespace import Namespace
from kvstore.settings import MIB
from kvstore.store import Store
from kvstore.tickets import TicketDesk
from kvstore.units import UnitKind, UnitMark
from tests.kvstore.blocks import SMALL, content, end_of, faulty, fill, in_loop, put, settings, tokens, until

pytestmark = pytest.mark.usefixtures("payload_kind")

END, COMMON = UnitKind.REQUEST_END, UnitKind.COMMON_PREFIX


class Bench:
    """A store over payloads that fail on demand, and two workers."""

    def __init__(self, path, **changes):
        self.path, self.changes = path, {"drain_seconds": 5.0} | changes
        self.faults = faulty()

    async def __aenter__(self):
        self.store = await Store.open(settings(self.path, **self.changes), self.faults.open)
        self.namespace = await self.store.open_namespace(Namespace(layout=SMALL))
        self.worker = self.store.connect(b"a" * 16, mapped=True)
        self.other = self.store.connect(b"b" * 16, mapped=True)
        return self

    async def __aexit__(self, *_):
        for gate in (
            self.faults.read_gate,
            self.faults.write_gate,
            self.faults.written_gate,
            self.faults.free_gate,
        ):
            gate.set()
        assert self.store.check() == []
        await self.store.close()

    def hashes(self, seed, blocks):
        return block_hashes(self.namespace, tokens(seed, blocks))

    async def put(self, hashes, parent=ROOT):
        return await put(self.store, self.worker, self.namespace, hashes, parent)

    async def reserve(self, hashes, parent=ROOT):
        return self.store.reserve(self.worker, self.namespace, parent, hashes, 0)

    def match(self, hashes):
        return self.store.match(self.namespace, hashes, 64 * len(hashes) + 1, align=64, store=False)

    def hit(self, hashes):
        return self.match(hashes).blocks

    async def load(self, hashes):
        """Leading blocks that can be loaded, every byte checked."""
        stream = self.store.load(self.worker, self.namespace, hashes, 0)
        reached = 0
        while batch := await stream.next():
            for index, _ in batch:
                assert stream.view(index) == content(hashes[index], SMALL.block_bytes)
            reached += len(batch)
            stream.give_back([index for index, _ in batch])
        stream.close(returned=True)
        return reached


@in_loop
async def test_acknowledged_means_readable_and_durable_waits_for_the_disk(tmp_path):
    async with Bench(tmp_path) as it:
        it.faults.write_gate.clear()
        hashes = it.hashes(1, 4)
        ticket = await it.put(hashes)
        assert it.hit(hashes) == 4
        assert await it.load(hashes) == 4
        waiting = asyncio.create_task(it.store.durable(ticket))
        await until(lambda: it.store.status().dirty_blocks == 4)
        assert not waiting.done()
        it.faults.write_gate.set()
        assert await waiting
        assert it.store.status().dirty_blocks == 0
        assert it.store.status().disk.blocks == 4


@in_loop
async def test_a_ticket_for_what_is_on_disk_already_is_durable_at_once(tmp_path):
    async with Bench(tmp_path) as it:
        hashes = it.hashes(1, 2)
        assert await it.store.durable(await it.put(hashes))
        lease = it.store.reserve(it.worker, it.namespace, ROOT, hashes, 0).lease
        it.faults.write_gate.clear()
        assert await it.store.durable(it.store.commit(it.worker, lease, [], end_of(hashes)))
        assert await it.store.durable(it.store.commit(it.worker, lease, [], []))


@in_loop
async def test_every_ticket_for_a_mark_waits_until_the_mark_is_on_disk(tmp_path):
    """Also the second one, for which the mark is no news."""
    async with Bench(tmp_path) as it:
        first, second = it.hashes(1, 2), it.hashes(2, 2)
        lease = await fill(it.store, it.worker, it.namespace, first)
        assert await it.store.durable(it.store.commit(it.worker, lease, first, []))
        it.faults.write_gate.clear()
        await it.put(second)  # occupies the writer
        await until(lambda: it.store.status().dirty_blocks == 2)
        tickets = [it.store.commit(it.worker, lease, [], end_of(first)) for _ in range(2)]
        waiting = [asyncio.create_task(it.store.durable(ticket)) for ticket in tickets]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        it.faults.write_gate.set()
        assert await asyncio.gather(*waiting) == [True, True]


@in_loop
async def test_a_mark_made_while_its_block_is_written_is_durable_too(tmp_path):
    async with Bench(tmp_path) as it:
        hashes = it.hashes(1, 2)
        lease = await fill(it.store, it.worker, it.namespace, hashes)
        it.faults.write_gate.clear()
        it.store.commit(it.worker, lease, hashes, [UnitMark(hashes[-1], COMMON)])
        await until(lambda: it.faults.writes == 1)
        ticket = it.store.commit(it.worker, lease, [], end_of(hashes))
        it.faults.write_gate.set()
        assert await it.store.durable(ticket)
    async with Bench(tmp_path) as it:
        row = it.store._index.find(hashes[-1])
        assert it.store._index.kinds[row] == END | COMMON


@in_loop
async def test_a_ticket_from_before_a_restart_is_unknown(tmp_path):
    async with Bench(tmp_path) as it:
        ticket = await it.put(it.hashes(1, 1))
    async with Bench(tmp_path) as it:
        await it.put(it.hashes(2, 1))
        with pytest.raises(TicketUnknown, match=str(ticket)):
            await it.store.durable(ticket)


@in_loop
async def test_a_failing_disk_turns_the_store_host_only_and_it_comes_back_by_itself(tmp_path, caplog):
    async with Bench(tmp_path) as it:
        kept = it.hashes(1, 4)
        assert await it.store.durable(await it.put(kept))
        it.faults.fail_writes = True
        with caplog.at_level(logging.WARNING):
            failed = await it.put(it.hashes(2, 4))
            assert not await it.store.durable(failed)
        assert it.store.status().mode == "host_only"
        assert it.store.counters["write_failures"] >= 1
        assert "event=host_only" in caplog.text
        assert await it.load(it.hashes(2, 4)) == 4  # it still serves
        # More than the arena holds goes on coming, unwritten blocks leave it.
        for seed in range(10, 15):
            await it.put(it.hashes(seed, 30))
        assert it.store.counters["host_lost_blocks"] > 0
        assert it.match(it.hashes(2, 4)).reason is MissReason.FAILED
        assert await it.load(it.hashes(14, 30)) == 30
        assert await it.load(kept) == 4
        assert it.store.check() == []
        it.faults.fail_writes = False
        await until(lambda: it.store.status().mode == "ok")
        assert "event=disk_recovered" in caplog.text
        assert await it.store.durable(await it.put(it.hashes(3, 4)))
        await until(lambda: it.store.status().dirty_blocks == 0)


@in_loop
async def test_a_block_lost_while_host_only_and_sealed_again_is_written_once(tmp_path):
    async with Bench(tmp_path) as it:
        it.faults.fail_writes = True
        again = it.hashes(1, 30)
        await it.put(again)
        await until(lambda: it.store.status().mode == "host_only")
        for seed in (2, 3, 4):
            await it.put(it.hashes(seed, 30))
        assert it.hit(again) == 0
        ticket = await it.put(again)
        it.faults.fail_writes = False
        await it.store.durable(ticket)  # False: whoever waited was told that the disk had failed
        await until(lambda: it.store.status().dirty_blocks == 0)
        assert it.hit(again) == 30
        index = it.store._index
        assert all(index.holds[row] == 0 for row in index)
        assert {it.store.arena.holders(index.slot[row]) for row in index if index.slot[row] != -1} == {0}


@in_loop
async def test_a_block_that_is_queued_twice_is_held_by_nobody_in_the_end(tmp_path):
    async with Bench(tmp_path) as it:
        it.faults.fail_writes = True
        again = it.hashes(1, 4)
        await it.put(again)
        await until(lambda: it.store.status().mode == "host_only")
        fillers = (it.worker, it.other, it.store.connect(b"c" * 16, mapped=True))
        leases = [
            (worker, it.store.reserve(worker, it.namespace, ROOT, it.hashes(seed, 42), 0).lease)
            for seed, worker in enumerate(fillers, 2)
        ]
        assert it.hit(again) == 0  # lost to the slots that are being filled
        for worker, lease in leases:
            it.store.release(worker, lease)
        await it.put(again)
        it.faults.fail_writes = False
        await until(lambda: it.store.status().mode == "ok" and not it.store.status().dirty_blocks)
        index = it.store._index
        assert it.hit(again) == 4
        assert all(index.holds[row] == 0 for row in index)
        assert {it.store.arena.holders(index.slot[row]) for row in index} == {0}


@in_loop
async def test_a_catalogue_that_fails_leaves_no_payload_behind(tmp_path):
    async with Bench(tmp_path) as it:
        assert await it.store.durable(await it.put(it.hashes(1, 4)))
        payloads = it.store._disk._payloads[SMALL.block_bytes]
        catalog = it.store._disk.catalog
        catalog_file, catalog._file = catalog._file, None  # commits of the real catalogue raise
        await it.put(it.hashes(2, 4))
        await until(lambda: it.store.counters["write_failures"] > 1)
        catalog._file = catalog_file
        await until(lambda: it.store.status().mode == "ok" and not it.store.status().dirty_blocks)
        keys = range(4096)  # more than may have been given out
        assert len(keys) - len(payloads.missing(keys)) == it.store.status().disk.blocks == 8


@in_loop
async def test_the_disk_never_holds_more_than_its_capacity(tmp_path):
    async with Bench(tmp_path) as it:
        for seed in range(40):
            assert await it.store.durable(await it.put(it.hashes(seed, 40)))
            status = it.store.status()
            assert status.disk.used_bytes <= status.disk.capacity_bytes
            assert status.host.used_bytes <= status.host.capacity_bytes
        assert it.store.counters["disk_evicted_blocks"] > 0
        assert sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*")) <= 16 * MIB
        # The last ones are there, the first are not.
        assert it.hit(it.hashes(39, 40)) == 40
        assert it.hit(it.hashes(0, 40)) == 0


@in_loop
async def test_what_is_used_stays_and_what_is_leased_stays_however_old(tmp_path):
    async with Bench(tmp_path) as it:
        used, leased = it.hashes(1000, 40), it.hashes(1001, 40)
        await it.store.durable(await it.put(used))
        await it.store.durable(await it.put(leased))
        stream = it.store.load(it.other, it.namespace, leased, 0)
        for seed in range(35):
            assert await it.store.durable(await it.put(it.hashes(seed, 40)))
            assert await it.load(used) == 40
        assert it.store.counters["disk_evicted_blocks"] > 0
        assert it.hit(leased) == 40
        stream.close(returned=True)
        for seed in range(35, 70):
            assert await it.store.durable(await it.put(it.hashes(seed, 40)))
        assert it.hit(leased) == 0


@in_loop
async def test_a_disk_full_of_leased_blocks_is_a_failure_that_passes(tmp_path):
    async with Bench(tmp_path) as it:
        leases = []
        for seed in range(40):
            hashes = it.hashes(seed, 40)
            lease = await fill(it.store, it.worker, it.namespace, hashes)
            ticket = it.store.commit(it.worker, lease, hashes, end_of(hashes))
            leases.append(lease)
            if not await it.store.durable(ticket):
                break
        assert it.store.status().mode == "host_only"
        status = it.store.status()
        assert status.disk.used_bytes <= status.disk.capacity_bytes
        assert it.hit(it.hashes(0, 40)) == 40
        for lease in leases:
            it.store.release(it.worker, lease)
        await until(lambda: it.store.status().mode == "ok")
        await until(lambda: it.store.status().dirty_blocks == 0)


@in_loop
async def test_two_layouts_share_one_capacity(tmp_path):
    async with Bench(tmp_path) as it:
        wide = SMALL.__class__(num_layers=8, latent_rank=32, rope_dim=16)
        theirs = await it.store.open_namespace(Namespace(layout=wide))
        for seed in range(30):
            assert await it.store.durable(await it.put(it.hashes(seed, 20)))
            for at in range(2):
                hashes = block_hashes(theirs, tokens(seed * 2 + at, 8))
                assert await it.store.durable(await put(it.store, it.other, theirs, hashes))
            assert it.store.status().disk.used_bytes <= it.store.settings.payload_bytes
        assert it.hit(it.hashes(29, 20)) == 20


@in_loop
async def test_uses_of_units_survive_a_restart(tmp_path):
    async with Bench(tmp_path) as it:
        hashes = it.hashes(1, 4)
        assert await it.store.durable(await it.put(hashes))
        for _ in range(3):
            await it.load(hashes)
    async with Bench(tmp_path) as it:
        index = it.store._index
        assert index.units[index.find(hashes[-1])].hits == 3


@in_loop
async def test_closing_writes_what_is_dirty_and_settles_every_ticket(tmp_path):
    it = Bench(tmp_path)
    await it.__aenter__()
    it.faults.write_gate.clear()
    hashes = it.hashes(1, 4)
    ticket = await it.put(hashes)
    waiting = asyncio.create_task(it.store.durable(ticket))
    closing = asyncio.create_task(it.store.close())
    await until(lambda: it.store._closing)
    it.faults.write_gate.set()
    assert await closing
    assert await waiting
    async with Bench(tmp_path) as it:
        assert it.hit(hashes) == 4
        assert await it.load(hashes) == 4


@in_loop
async def test_closing_with_a_disk_that_fails_ends_and_says_so(tmp_path):
    it = Bench(tmp_path, drain_seconds=0.2)
    await it.__aenter__()
    it.faults.fail_writes = True
    ticket = await it.put(it.hashes(1, 4))
    assert not await it.store.close()
    assert not await it.store.durable(ticket)
    async with Bench(tmp_path) as it:
        assert it.hit(it.hashes(1, 4)) == 0


@in_loop
async def test_closing_ends_the_loads_that_wait(tmp_path):
    it = Bench(tmp_path)
    await it.__aenter__()
    hashes = it.hashes(1, 40)
    assert await it.store.durable(await it.put(hashes))
    for seed in range(2, 5):
        await it.store.durable(await it.put(it.hashes(seed, 40)))
    it.faults.read_gate.clear()
    stream = it.store.load(it.worker, it.namespace, hashes, 0)
    step = asyncio.create_task(stream.next())
    await until(lambda: it.faults.reads > 0)
    closing = asyncio.create_task(it.store.close())
    await until(lambda: step.done())
    assert (step.result(), stream.short) == ([], 0)
    it.faults.read_gate.set()
    assert await closing


@in_loop
async def test_reserve_asks_to_come_back_while_the_arena_is_full_of_unwritten_blocks(tmp_path):
    async with Bench(tmp_path) as it:
        it.faults.write_gate.clear()
        await it.put(it.hashes(1, 42))
        await it.put(it.hashes(2, 42))
        more = it.hashes(3, 10)
        reserved = it.store.reserve(it.worker, it.namespace, ROOT, more, 0)
        assert reserved.states == [ReserveState.FILL] + [ReserveState.RETRY] * 9
        it.faults.write_gate.set()
        await until(lambda: it.store.status().dirty_blocks == 0)
        again = it.store.reserve(it.worker, it.namespace, ROOT, more, reserved.lease)
        assert again.states == [ReserveState.FILL] * 10
        it.store.release(it.worker, reserved.lease)


@in_loop
async def test_what_a_drain_has_no_time_for_is_not_durable_and_what_is_under_way_is(tmp_path):
    async with Bench(tmp_path, drain_seconds=0.01) as it:
        it.faults.write_gate.clear()
        written, queued = it.hashes(1, 4), it.hashes(2, 4)
        first = asyncio.ensure_future(it.store.durable(await it.put(written)))
        await until(lambda: it.faults.writes == 1)
        second = asyncio.ensure_future(it.store.durable(await it.put(queued)))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(it.store._writer.close(0.01))
        await until(it.store._writer._stop.is_set)
        it.faults.write_gate.set()
        assert not await closing
        assert (await first, await second) == (True, False)
    async with Bench(tmp_path) as it:
        assert (it.hit(written), it.hit(queued)) == (4, 0)


@in_loop
async def test_a_store_that_is_closing_takes_nothing_new_and_says_so(tmp_path):
    faults = faulty()
    store = await Store.open(settings(tmp_path), faults.open)
    namespace = await store.open_namespace(Namespace(layout=SMALL))
    worker = store.connect(b"w" * 16, mapped=True)
    hashes = block_hashes(namespace, tokens(1, 4))
    faults.write_gate.clear()
    ticket = await put(store, worker, namespace, hashes)
    closing = asyncio.ensure_future(store.close())
    await until(lambda: faults.writes == 1)
    for call in (
        lambda: store.match(namespace, hashes, 257, align=64, store=False),
        lambda: store.load(worker, namespace, hashes, 0),
        lambda: store.reserve(worker, namespace, ROOT, hashes, 0),
    ):
        with pytest.raises(Unavailable, match="shutting down"):
            call()
    faults.write_gate.set()
    assert await closing
    assert await store.durable(ticket)


def settled_ticket(desk, namespace, row=1):
    ticket = desk.give([row], namespace)
    desk.settle(row, durable=True)
    return ticket


@in_loop
async def test_a_ticket_that_many_others_came_after_is_unknown(tmp_path):
    desk = TicketDesk(remembered=64)
    tickets = [settled_ticket(desk, 7) for _ in range(64 + 2)]
    for old in tickets[:2]:
        with pytest.raises(TicketUnknown, match="too old"):
            await desk.wait(old)
    assert await desk.wait(tickets[2])
    assert desk.namespace(tickets[-1]) == 7
