"""What a store keeps in memory after much has come and gone is what it keeps after little."""

import gc
import sys
from collections import Counter

import pytest

from kvstore.testing.faults import Faults
from kvstore.tickets import TicketDesk
from tests.kvstore.blocks import content, end_of, in_loop, until
from tests.kvstore.test_writeback import Bench

BLOCKS = 20


def census(root) -> tuple[Counter[str], int]:
    """All objects that can be reached from one, by type, and the bytes of their own memory."""
    gc.collect()
    skipped = (type, type(sys), type(census), Faults)  # these remember every key
    seen, todo, counts, nbytes = {id(root)}, [root], Counter(), 0
    while todo:
        each = todo.pop()
        counts[type(each).__name__] += 1
        nbytes += sys.getsizeof(each)
        for other in gc.get_referents(each):
            if id(other) not in seen and not isinstance(other, skipped):
                seen.add(id(other))
                todo.append(other)
    return counts, nbytes


def grown(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    """Types of which there are more than a few more."""
    return {name: after[name] - count for name, count in before.items() if after[name] > count * 1.05 + 20}


class Churn(Bench):
    """A store of constant size under a stream of new documents."""

    async def turn(self, seed):
        """A document comes, is loaded, gets units, and makes others leave."""
        hashes = self.hashes(seed, BLOCKS)
        lease = self.store.reserve(self.worker, self.namespace, b"\0" * 32, hashes, 0)
        size = self.store.space(self.namespace).block_bytes
        for block, offset in zip(hashes, lease.offsets, strict=True):
            self.store.arena.memory[offset : offset + size] = content(block, size)
        self.store.match(self.namespace, hashes, 64 * BLOCKS + 1, align=64, store=True)
        ticket = self.store.commit(self.worker, lease.lease, hashes, end_of(hashes))
        for _ in range(3):
            self.store.commit(self.worker, lease.lease, [], end_of(hashes[:5]))
            self.store.commit(self.worker, lease.lease, [], [])
        self.store.release(self.worker, lease.lease)
        assert await self.store.durable(ticket)
        assert await self.load(hashes) == BLOCKS

    async def turns(self, seeds):
        for seed in seeds:
            await self.turn(seed)
        await until(lambda: not self.store.status().dirty_blocks)
        return census(self.store)


@pytest.mark.usefixtures("payload_kind")
@in_loop
async def test_memory_is_flat_under_steady_churn(tmp_path):
    """By counts of objects and their sizes, not by what the process takes."""
    async with Churn(tmp_path, ghost_bytes=16 << 10) as it:
        it.store._writer.tickets = TicketDesk(remembered=64)
        before, bytes_before = await it.turns(range(60))  # the disk holds some 50
        after, bytes_after = await it.turns(range(60, 130))
        assert grown(before, after) == {}
        assert bytes_after < bytes_before * 1.25  # one table may double; tickets were a megabyte


async def failing_turns(it: Bench, seeds) -> Counter[str]:
    for seed in seeds:
        await it.put(it.hashes(seed, BLOCKS))
    return census(it.store)[0]


@in_loop
async def test_memory_is_flat_while_the_disk_fails(tmp_path):
    async with Bench(tmp_path, ghost_bytes=64 << 10, drain_seconds=0.1) as it:
        it.store._writer.tickets = TicketDesk(remembered=64)
        it.faults.fail_writes = True
        assert not await it.store.durable(await it.put(it.hashes(0, 4)))
        before = await failing_turns(it, range(1, 60))
        after = await failing_turns(it, range(60, 200))
        assert grown(before, after) == {}


@in_loop
async def test_a_settled_ticket_takes_no_more_than_its_number_and_its_bit(tmp_path):
    desk = TicketDesk(remembered=4096)
    sizes = []
    for rows in (1, 96):
        for _ in range(4096):
            desk.give(range(rows), 7)
            for row in range(rows):
                desk.settle(row, durable=True)
        assert len(desk) == 4096
        counts, nbytes = census(desk)
        sizes.append(nbytes / 4096)
        assert counts["_Open"] == counts["Future"] == 0
    assert max(sizes) < 200  # 2,100 after a commit of 24 blocks when each kept its set and a future
