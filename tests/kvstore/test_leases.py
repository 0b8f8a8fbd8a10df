"""Leases through a real store: what they keep, and what ends them."""

import asyncio

import pytest

from kvstore.api import ReserveState
from kvstore.errors import InvalidArgument, LeaseUnknown, NotReserved
from kvstore.hashing import ROOT, block_hashes
from kvstore.namespace import Namespace
from kvstore.settings import MIB
from kvstore.slots import SlotState
from kvstore.store import Store
from kvstore.testing.faults import Faults
from tests.kvstore.blocks import SMALL, content, end_of, fill, in_loop, put, settings, tokens, until

FILL, PENDING, RETRY = ReserveState.FILL, ReserveState.PENDING, ReserveState.RETRY
ALL = 85  # SMALL blocks in an arena of 1 MiB
QUOTA = 44


async def opened(path, **changes):
    store = await Store.open(settings(path, **changes))
    return store, await store.open_namespace(Namespace(layout=SMALL))


def workers(store):
    return store.connect(b"a" * 16, mapped=True), store.connect(b"b" * 16, mapped=False)


@in_loop
async def test_a_released_lease_frees_what_was_not_committed(tmp_path):
    store, namespace = await opened(tmp_path)
    worker, _ = workers(store)
    hashes = block_hashes(namespace, tokens(1, 4))
    lease = await fill(store, worker, namespace, hashes)
    store.commit(worker, lease, hashes[:2], [])
    store.release(worker, lease)
    assert store.match(namespace, hashes, 256, align=64, store=False).stored_blocks == 2
    assert store.arena.count(SlotState.FILLING) == store.arena.count(SlotState.ORPHAN) == 0
    assert store.check() == []
    store.release(worker, lease)  # unknown by now: ignored
    await store.close()


@in_loop
async def test_a_worker_that_dies_leaves_nothing_held(tmp_path):
    store, namespace = await opened(tmp_path)
    worker, other = workers(store)
    hashes = block_hashes(namespace, tokens(1, 4))
    assert await store.durable(await put(store, other, namespace, hashes))
    await fill(store, worker, namespace, block_hashes(namespace, tokens(2, 4)))
    stream = store.load(worker, namespace, hashes, 0)
    assert await stream.next()
    store.disconnect(worker)
    assert store.status().leases == 0
    assert worker.held_bytes == 0
    assert store.arena.count(SlotState.CLEAN) == 4
    assert store.check() == []
    # The stream that it left behind ends, and gives nothing out any more.
    assert await stream.next() == []
    stream.close(returned=True)
    assert store.check() == []
    await store.close()


@in_loop
async def test_a_lease_of_another_worker_is_unknown(tmp_path):
    store, namespace = await opened(tmp_path)
    worker, other = workers(store)
    hashes = block_hashes(namespace, tokens(1, 2))
    lease = await fill(store, worker, namespace, hashes)
    for use in (
        lambda: store.commit(other, lease, hashes, []),
        lambda: store.reserve(other, namespace, ROOT, hashes, lease),
        lambda: store.slot_for_upload(other, lease, hashes[0]),
    ):
        with pytest.raises(LeaseUnknown, match=str(lease)):
            use()
    store.release(other, lease)
    store.commit(worker, lease, hashes, [])  # none of it did any harm
    await store.close()


@in_loop
async def test_a_mapped_slot_outlives_its_lease_until_the_worker_lets_go(tmp_path):
    """A stopped worker may wake up and write: so the clock takes the block, but not the slot."""
    store, namespace = await opened(tmp_path, lease_seconds=0.02)
    worker, other = workers(store)
    hashes = block_hashes(namespace, tokens(1, 4))
    reserved = store.reserve(worker, namespace, ROOT, hashes, 0)
    await until(lambda: store.counters["expired_leases"] > 0)
    with pytest.raises(LeaseUnknown, match="expired"):
        store.commit(worker, reserved.lease, hashes, [])
    assert store.arena.count(SlotState.ORPHAN) == 4
    assert worker.held_bytes == 4 * SMALL.block_bytes
    # Another worker fills the same blocks, in other slots, and the late one spoils nothing.
    again = store.reserve(other, namespace, ROOT, hashes, 0)
    assert again.states == [FILL] * 4
    assert not set(again.offsets) & set(reserved.offsets)
    for block, offset in zip(hashes, again.offsets, strict=True):
        store.arena.memory[offset : offset + SMALL.block_bytes] = content(block, SMALL.block_bytes)
    store.commit(other, again.lease, hashes, end_of(hashes))
    for offset in reserved.offsets:
        store.arena.memory[offset : offset + SMALL.block_bytes] = b"x" * SMALL.block_bytes
    stream = store.load(other, namespace, hashes, 0)
    seen = []
    while batch := await stream.next():
        for index, _ in batch:
            assert stream.view(index) == content(hashes[index], SMALL.block_bytes)
            seen.append(index)
        stream.give_back([index for index, _ in batch])
    assert seen == [0, 1, 2, 3]
    stream.close(returned=True)
    store.release(worker, reserved.lease)
    assert store.arena.count(SlotState.ORPHAN) == 0
    assert store.check() == []
    await store.close()


@in_loop
async def test_slots_of_a_worker_that_gets_bytes_are_freed_by_the_clock(tmp_path):
    store, namespace = await opened(tmp_path, lease_seconds=0.02)
    _, worker = workers(store)
    hashes = block_hashes(namespace, tokens(1, 4))
    lease = store.reserve(worker, namespace, ROOT, hashes, 0).lease
    await until(lambda: store.counters["expired_leases"] > 0)
    assert store.status().leases == 0
    assert store.arena.used_bytes == 0
    with pytest.raises(LeaseUnknown):
        store.slot_for_upload(worker, lease, hashes[0])
    assert store.check() == []
    await store.close()


@in_loop
async def test_a_stream_of_bytes_whose_lease_has_expired_gives_no_bytes(tmp_path):
    """Its slots may hold other blocks by then."""
    store, namespace = await opened(tmp_path, lease_seconds=0.02)
    _, worker = workers(store)
    hashes = block_hashes(namespace, tokens(1, 4))
    await put(store, worker, namespace, hashes)
    stream = store.load(worker, namespace, hashes, 0)
    (index, _), *_ = await stream.next()
    before = store.counters["expired_leases"]
    await until(lambda: store.counters["expired_leases"] > before)
    with pytest.raises(LeaseUnknown):
        stream.view(index)
    with pytest.raises(LeaseUnknown):
        stream.checksum(index)
    stream.close(returned=True)
    assert store.check() == []
    await store.close()


@in_loop
async def test_a_load_whose_lease_ends_under_it_ends_short(tmp_path):
    """After that its blocks may be evicted, and their rows may mean other blocks."""
    faults = Faults()
    store = await Store.open(settings(tmp_path), faults.open)
    namespace = await store.open_namespace(Namespace(layout=SMALL))
    worker, other = workers(store)
    hashes = block_hashes(namespace, tokens(1, 40))
    assert await store.durable(await put(store, other, namespace, hashes))
    await put(store, other, namespace, block_hashes(namespace, tokens(2, 40)))
    await until(lambda: not store.status().dirty_blocks)
    for seed in range(3, 7):  # push the first chain out of the arena
        await store.durable(await put(store, other, namespace, block_hashes(namespace, tokens(seed, 40))))
    faults.read_gate.clear()
    stream = store.load(worker, namespace, hashes, 0)
    step = asyncio.create_task(stream.next())
    await until(lambda: faults.reads > 0)
    store.release(worker, stream.lease)
    faults.read_gate.set()
    assert await step == []
    assert stream.short == 0
    stream.close(returned=True)
    await until(lambda: store._host.reading() == 0)
    assert store.check() == []
    await store.close()


@in_loop
async def test_what_a_broken_stream_announced_stays_until_the_worker_releases_it(tmp_path):
    store, namespace = await opened(tmp_path)
    worker, other = workers(store)
    hashes = block_hashes(namespace, tokens(1, 4))
    await put(store, other, namespace, hashes)
    stream = store.load(worker, namespace, hashes, 0)
    await stream.next()
    stream.close(returned=False)
    assert worker.held_bytes == 4 * SMALL.block_bytes
    store.release(worker, stream.lease)
    assert worker.held_bytes == 0
    assert store.check() == []
    await store.close()


@in_loop
async def test_use_keeps_a_lease_alive(tmp_path):
    store, namespace = await opened(tmp_path, lease_seconds=0.2)
    worker, other = workers(store)
    idle = store.reserve(other, namespace, ROOT, [], 0).lease
    hashes = block_hashes(namespace, tokens(1, 2))
    lease = store.reserve(worker, namespace, ROOT, hashes, 0).lease

    def used_until_the_other_expired():
        store.slot_for_upload(worker, lease, hashes[0])
        return idle not in other.leases

    await until(used_until_the_other_expired)
    assert store.slot_for_upload(worker, lease, hashes[0]).nbytes == SMALL.block_bytes
    await store.close()


@in_loop
async def test_a_worker_holds_half_of_the_arena_at_most(tmp_path):
    store, namespace = await opened(tmp_path)
    worker, other = workers(store)
    states = store.reserve(worker, namespace, ROOT, block_hashes(namespace, tokens(1, 60)), 0).states
    assert states == [FILL] * QUOTA + [RETRY] * (60 - QUOTA)
    others = store.reserve(other, namespace, ROOT, block_hashes(namespace, tokens(2, 60)), 0).states
    assert others.count(FILL) == ALL - QUOTA
    assert store.check() == []
    await store.close()


@in_loop
async def test_one_block_is_always_allowed(tmp_path):
    big = SMALL.__class__(num_layers=130, latent_rank=32, rope_dim=16)  # 798,720 bytes: more than half
    store = await Store.open(settings(tmp_path))
    namespace = await store.open_namespace(Namespace(layout=big))
    worker, other = workers(store)
    hashes = block_hashes(namespace, tokens(1, 3))
    for at, block in enumerate(hashes):
        parent = hashes[at - 1] if at else ROOT
        ticket = await put(store, worker, namespace, [block], parent)
        assert await store.durable(ticket)
    stream = store.load(other, namespace, hashes, 0)
    for at in range(3):
        assert [index for index, _ in await stream.next()] == [at]
        assert stream.view(at) == content(hashes[at], big.block_bytes)
        stream.give_back([at])
    assert await stream.next() == []
    assert stream.short is None
    stream.close(returned=True)
    assert store.check() == []
    await store.close()


@in_loop
async def test_loads_that_share_a_tight_arena_all_come_through(tmp_path):
    """No load may hold later blocks while its next one finds no slot: they would wait for one another."""
    store, namespace = await opened(tmp_path, host_bytes=MIB)
    worker, _ = workers(store)
    chains = [block_hashes(namespace, tokens(seed, 60)) for seed in range(6)]
    for hashes in chains:
        for at in range(0, 60, 20):
            ticket = await put(store, worker, namespace, hashes[at : at + 20], hashes[at - 1] if at else ROOT)
            assert await store.durable(ticket)

    async def load(holder, hashes):
        stream = store.load(holder, namespace, hashes, 0)
        reached = 0
        while batch := await stream.next():
            await asyncio.sleep(0)
            for index, _ in batch:
                assert stream.view(index) == content(hashes[index], SMALL.block_bytes)
            reached += len(batch)
            stream.give_back([index for index, _ in batch])
        stream.close(returned=True)
        return reached

    async with asyncio.timeout(30):
        done = await asyncio.gather(
            *(load(store.connect(bytes([n]) * 16, mapped=True), chains[n % 6]) for n in range(12))
        )
    assert done == [60] * 12
    assert store.check() == []
    await store.close()


@in_loop
async def test_a_pending_block_belongs_to_the_worker_that_fills_it(tmp_path):
    store, namespace = await opened(tmp_path)
    worker, other = workers(store)
    hashes = block_hashes(namespace, tokens(1, 2))
    lease = await fill(store, worker, namespace, hashes)
    again = store.reserve(other, namespace, ROOT, hashes, 0)
    assert again.states == [PENDING] * 2
    with pytest.raises(NotReserved):
        store.commit(other, again.lease, hashes, [])
    # Asked again by its own lease, the slots are the same.
    assert store.reserve(worker, namespace, ROOT, hashes, lease).states == [FILL] * 2
    # The other may leave its mark; it counts once the block is there.
    ticket = store.commit(other, again.lease, [], end_of(hashes))
    assert store.match(namespace, hashes, 129, align=64, store=False).blocks == 0
    store.commit(worker, lease, hashes, [])
    assert store.match(namespace, hashes, 129, align=64, store=False).blocks == 2
    assert await store.durable(ticket)
    await store.close()


@in_loop
async def test_a_mark_on_a_pending_block_that_never_comes_is_not_durable(tmp_path):
    store, namespace = await opened(tmp_path)
    worker, other = workers(store)
    hashes = block_hashes(namespace, tokens(1, 2))
    lease = await fill(store, worker, namespace, hashes)
    second = store.reserve(other, namespace, ROOT, hashes, 0).lease
    tickets = [store.commit(other, second, [], end_of(hashes)) for _ in range(2)]
    store.release(worker, lease)
    assert [await store.durable(ticket) for ticket in tickets] == [False, False]
    assert store.check() == []
    await store.close()


@in_loop
async def test_a_load_whose_next_block_finds_no_slot_holds_no_later_ones(tmp_path):
    """Else two loads in a full arena would each hold what the other waits for."""
    store, namespace = await opened(tmp_path)
    fillers = [store.connect(bytes([n]) * 16, mapped=True) for n in range(2)]
    readers = [store.connect(bytes([n]) * 16, mapped=True) for n in range(2, 6)]
    chains = [block_hashes(namespace, tokens(seed, 16)) for seed in (1, 2)]
    for hashes in chains:
        assert await store.durable(await put(store, fillers[0], namespace, hashes))
    # All slots but 30 are being filled, and those 30 hold all but the first block of both chains.
    leases = [
        await fill(store, one, namespace, block_hashes(namespace, tokens(9 + at, 27 + at)))
        for at, one in enumerate(fillers)
    ]
    first = [
        store.load(reader, namespace, hashes, 1) for reader, hashes in zip(readers, chains, strict=False)
    ]
    for stream in first:
        seen = []
        while len(seen) < 15:
            seen += await stream.next()
    assert store.arena.count(SlotState.CLEAN) == 30

    async def load(holder, hashes):
        stream = store.load(holder, namespace, hashes, 0)
        reached = 0
        while batch := await stream.next():
            for index, _ in batch:
                assert stream.view(index) == content(hashes[index], SMALL.block_bytes)
            reached += len(batch)
            stream.give_back([index for index, _ in batch])
        stream.close(returned=True)
        return reached

    loads = [
        asyncio.create_task(load(reader, hashes)) for reader, hashes in zip(readers[2:], chains, strict=True)
    ]
    await until(lambda: store._host.reading() == 2)
    for stream in first:
        stream.close(returned=True)
    async with asyncio.timeout(20):
        assert await asyncio.gather(*loads) == [16, 16]
    for one, lease in zip(fillers, leases, strict=True):
        store.release(one, lease)
    assert store.check() == []
    await store.close()


@in_loop
async def test_a_worker_whose_reservations_use_up_its_quota_can_still_load(tmp_path):
    store, namespace = await opened(tmp_path)
    worker, other = workers(store)
    hashes = block_hashes(namespace, tokens(1, 10))
    await put(store, other, namespace, hashes)
    await fill(store, worker, namespace, block_hashes(namespace, tokens(2, QUOTA)))
    stream = store.load(worker, namespace, hashes, 0)
    for at in range(10):
        assert [index for index, _ in await stream.next()] == [at]
        stream.give_back([at])
    stream.close(returned=True)
    store.disconnect(worker)
    assert store.check() == []
    await store.close()


@in_loop
async def test_only_what_was_announced_is_given_back_and_only_once(tmp_path):
    store, namespace = await opened(tmp_path)
    worker, _ = workers(store)
    hashes = block_hashes(namespace, tokens(1, 4))
    await put(store, worker, namespace, hashes)
    stream = store.load(worker, namespace, hashes, 0)
    assert [index for index, _ in await stream.next()] == [0, 1, 2, 3]
    stream.give_back([1])
    for wrong in (1, 4):
        with pytest.raises(InvalidArgument, match=f"block {wrong} was not announced"):
            stream.give_back([wrong])
    assert sorted(stream.announced()) == [0, 2, 3]
    assert worker.held_bytes == 3 * SMALL.block_bytes
    stream.close(returned=True)
    stream.close(returned=True)
    assert worker.held_bytes == 0
    assert store.check() == []
    await store.close()
