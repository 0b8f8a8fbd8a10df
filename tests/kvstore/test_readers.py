"""Several loads of one document at a time read the disk once, as far as they stay near each other."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvstore import loading, readers
from kvstore.api import Readers
from kvstore.errors import InvalidArgument
from kvstore.hashing import block_hashes
from kvstore.leases import Holder
from kvstore.loading import LoadStream
from kvstore.namespace import Namespace
from kvstore.settings import MIB
from kvstore.store import Store
from tests.kvstore.blocks import SMALL, content, faulty, fill, in_loop, settings, tokens, until

ARENA = 85  # blocks
WINDOW = MIB // 4 // SMALL.block_bytes  # how far readers of a group may be apart
BLOCKS = 2 * ARENA
GROUP = b"g" * 16


@dataclass
class Reading:
    """A load of which every byte is checked."""

    stream: LoadStream
    hashes: list[bytes]
    reached: int = 0

    async def step(self) -> bool:
        batch = await self.stream.next()
        for index, _ in batch:
            assert index == self.reached
            assert self.stream.view(index) == content(self.hashes[index], SMALL.block_bytes)
            self.reached += 1
        self.stream.give_back([index for index, _ in batch])
        return bool(batch)

    async def finish(self) -> int:
        while await self.step():
            pass
        self.stream.close(returned=True)
        return self.reached


@dataclass
class Shelf:
    """A store whose document lies on disk only."""

    store: Store
    namespace: bytes
    hashes: list[bytes]

    def read(self, readers: Readers | None = None) -> Reading:
        return Reading(self.store.load(self.worker(), self.namespace, self.hashes, 0, readers), self.hashes)

    def worker(self) -> Holder:
        return self.store.connect(bytes(16), mapped=True)

    @property
    def disk_reads(self) -> int:
        return self.store.counters["disk_read_blocks"]


@contextlib.asynccontextmanager
async def shelf(path) -> Iterator[Shelf]:
    store = await Store.open(settings(path), faulty().open)
    namespace = await store.open_namespace(Namespace(layout=SMALL))
    hashes = block_hashes(namespace, tokens(1, BLOCKS))
    worker = store.connect(bytes(16), mapped=True)
    parent = bytes(32)
    for at in range(0, BLOCKS, 10):
        part = hashes[at : at + 10]
        lease = await fill(store, worker, namespace, part, parent)
        assert await store.durable(store.commit(worker, lease, part, []))
        store.release(worker, lease)
        parent = part[-1]
    await store.close()
    store = await Store.open(settings(path), faulty().open)
    yield Shelf(store, await store.open_namespace(Namespace(layout=SMALL)), hashes)
    assert store.check() == []
    assert not store._host._wanted
    assert not store._readers._groups
    await store.close()


@in_loop
async def test_what_lies_between_two_loads_stays_in_the_arena(tmp_path):
    async with shelf(tmp_path) as it:
        leader, follower = it.read(), it.read()
        while leader.reached < 48:
            assert await leader.step()
        for _ in range(BLOCKS // 16 + 1):
            await leader.step()
            await follower.step()
        assert [await leader.finish(), await follower.finish()] == [BLOCKS] * 2
        assert it.disk_reads == BLOCKS


@in_loop
async def test_a_load_that_comes_back_to_a_document_finds_what_is_left_of_it(tmp_path):
    async with shelf(tmp_path) as it:
        assert await it.read().finish() == BLOCKS
        before = it.disk_reads
        assert await it.read().finish() == BLOCKS
        # Least recently used alone would drop each block just before the load comes to it.
        assert it.disk_reads - before < BLOCKS - ARENA // 2


@in_loop
async def test_a_reader_that_is_ahead_waits_for_those_that_have_not_come_yet(tmp_path):
    async with shelf(tmp_path) as it:
        first = it.read(Readers(GROUP, 4))
        reading = asyncio.create_task(first.finish())
        await until(lambda: it.store._host._room)
        assert first.reached == WINDOW
        later = [asyncio.create_task(it.read(Readers(GROUP, 4)).finish()) for _ in range(3)]
        assert await asyncio.gather(reading, *later) == [BLOCKS] * 4
        assert it.disk_reads == BLOCKS
        assert "readers_left_behind" not in it.store.counters


@in_loop
async def test_readers_never_are_further_apart_than_the_window(tmp_path):
    async with shelf(tmp_path) as it:
        one, two = it.read(Readers(GROUP, 2)), it.read(Readers(GROUP, 2))
        reading = asyncio.create_task(one.finish())
        while two.reached < BLOCKS:
            await until(lambda: one.reached == BLOCKS or it.store._host._room)
            assert one.reached - two.reached <= WINDOW + loading.WINDOW
            await two.step()
        assert [await reading, await two.finish()] == [BLOCKS] * 2
        assert it.disk_reads == BLOCKS


@in_loop
async def test_a_reader_that_never_comes_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PATIENCE", 0.05)
    async with shelf(tmp_path) as it:
        assert await it.read(Readers(GROUP, 3)).finish() == BLOCKS
        assert it.store.counters["readers_left_behind"] == 2


@in_loop
async def test_a_reader_that_stands_still_is_left_behind_and_reads_again(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PATIENCE", 0.05)
    async with shelf(tmp_path) as it:
        one, two, still = (it.read(Readers(GROUP, 3)) for _ in range(3))
        await still.step()
        assert await asyncio.gather(one.finish(), two.finish()) == [BLOCKS] * 2
        assert it.disk_reads == BLOCKS
        assert it.store.counters["readers_left_behind"] == 1
        assert await still.finish() == BLOCKS
        assert it.disk_reads > BLOCKS


@in_loop
async def test_a_reader_that_leaves_sets_the_others_free(tmp_path):
    async with shelf(tmp_path) as it:
        one, two = it.read(Readers(GROUP, 2)), it.read(Readers(GROUP, 2))
        reading = asyncio.create_task(one.finish())
        await until(lambda: it.store._host._room)
        two.stream.close(returned=True)
        assert await reading == BLOCKS
        assert "readers_left_behind" not in it.store.counters


@in_loop
async def test_a_reader_that_comes_when_the_others_have_ended_waits_for_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PATIENCE", 0.05)
    async with shelf(tmp_path) as it:
        assert await it.read(Readers(GROUP, 2)).finish() == BLOCKS
        monkeypatch.setattr(readers, "PATIENCE", 3600)
        assert await it.read(Readers(GROUP, 2)).finish() == BLOCKS
        assert it.store.counters["readers_left_behind"] == 1


@in_loop
async def test_one_reader_too_many_reads_by_itself(tmp_path):
    async with shelf(tmp_path) as it:
        one, too_many = it.read(Readers(GROUP, 1)), it.read(Readers(GROUP, 1))
        assert await too_many.finish() == BLOCKS
        assert await one.finish() == BLOCKS


@in_loop
async def test_readers_must_agree_on_their_number(tmp_path):
    async with shelf(tmp_path) as it:
        one = it.read(Readers(GROUP, 2))
        with pytest.raises(InvalidArgument, match="group of 2"):
            it.read(Readers(GROUP, 3))
        one.stream.close(returned=True)


@pytest.mark.parametrize(("group", "count"), [(b"short", 2), ("g" * 16, 2), (GROUP, 0), (GROUP, 1025)])
def test_a_group_has_a_name_and_a_number(group, count):
    with pytest.raises(InvalidArgument, match="readers of"):
        Readers(group, count)
