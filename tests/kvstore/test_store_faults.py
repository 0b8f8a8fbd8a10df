"""What is damaged is a miss, a counter and a log line, and the next store heals it."""

import asyncio
import itertools
import logging
import os
import re
from pathlib import Path

import lmdb
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvstore.api import MissReason, ReserveState
from kvstore.embedded import Embedded
from kvstore.errors import (
    CapacityTooSmall,
    DataDirError,
    DataDirInUse,
    DiskError,
    FormatMismatch,
    InvalidArgument,
)
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import DEEPSEEK_V3
from kvstore.namespace import Namespace
from kvstore.payloads import Place
from kvstore.payloads.direct import Run
from kvstore.payloads.kinds import OPEN
from kvstore.settings import MIB
from kvstore.store import Store
from kvstore.units import UnitKind
from tests.kvstore.blocks import (
    CHOSEN,
    OTHER,
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
SIZE = SMALL.block_bytes
POSITIONS = [0, 1, 4095, 4096, SIZE // 2, SIZE - 2, SIZE - 1]


def payload_files(path: Path) -> list[Path]:
    return [file for file in (path / "payloads" / str(SIZE)).iterdir() if file.name != "lock.mdb"]


def flip(path: Path, stored: bytes, position: int, bits: int = 0x10) -> None:
    """Flip bits of a byte of what lies somewhere in the payload files."""
    (found,) = [file for file in payload_files(path) if stored in file.read_bytes()]
    at = found.read_bytes().find(stored) + position
    with open(found, "r+b") as file:
        file.seek(at)
        file.write(bytes([stored[position] ^ bits]))


def push_out(store, worker) -> None:
    """Fill the arena with other blocks, so that the next load reads the disk."""
    for seed in range(100, 103):
        store_chain(store, worker.namespace, block_hashes(worker.namespace, tokens(seed, 40)))


def stored(store, blocks=BLOCKS):
    worker = Conversation(store)
    hashes = block_hashes(worker.namespace, tokens(1, blocks))
    assert store_chain(store, worker.namespace, hashes)
    return worker, hashes


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("at", [0, 4, BLOCKS - 1], ids=["first", "middle", "last"])
def test_a_flipped_byte_is_a_miss_and_heals(tmp_path, caplog, position, at):
    with open_store(tmp_path) as store:
        worker, hashes = stored(store)
    flip(tmp_path, content(hashes[at], SIZE), position)
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        with caplog.at_level(logging.WARNING):
            assert load_chain(store, worker.namespace, hashes) == at
        assert store.status().counters["checksum_failures"] == 1
        assert f"block={hashes[at][:6].hex()}" in caplog.text
        assert "checksum" in caplog.text
        assert worker.match(tokens(1, BLOCKS)).stored_blocks == at
        assert store.check() == []
        assert store_chain(store, worker.namespace, hashes)
        assert load_chain(store, worker.namespace, hashes) == BLOCKS
    with open_store(tmp_path) as store:
        assert load_chain(store, worker.namespace, hashes) == BLOCKS
        assert "checksum_failures" not in store.status().counters


def test_a_byte_that_is_flipped_while_the_store_runs_is_a_miss_and_heals(tmp_path, caplog):
    with open_store(tmp_path) as store:
        worker, hashes = stored(store)
        push_out(store, worker)
        flip(tmp_path, content(hashes[3], SIZE), 77)
        assert load_chain(store, worker.namespace, hashes) == 3
        assert store.status().counters["checksum_failures"] == 1
        assert store_chain(store, worker.namespace, hashes)
        push_out(store, worker)
        assert load_chain(store, worker.namespace, hashes) == BLOCKS


@hypothesis_settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    position=st.integers(0, SIZE - 1), at=st.integers(0, BLOCKS - 1), codec=st.sampled_from(["raw", "zstd"])
)
def test_no_flipped_byte_is_ever_delivered(tmp_path_factory, position, at, codec):
    path = tmp_path_factory.mktemp("flip")
    with open_store(path, codec=codec) as store:
        worker = Conversation(store)
        hashes = block_hashes(worker.namespace, tokens(1, BLOCKS))
        store_chain(store, worker.namespace, hashes, compressible=True)
        index = store._store._index
        length = index.length[index.find(hashes[at])]
        place = index.place[index.find(hashes[at])]
        run = Run.fresh(store._store._disk.lead, length)
        store._store._disk._payloads[SIZE].read_into(Place(place), run)
    flip(path, bytes(run.payload), position * length // SIZE, 0xFF)
    with open_store(path, codec=codec) as store:
        worker = Conversation(store)
        reached = load_chain(store, worker.namespace, hashes, compressible=True)
        # Only padding behind a zstd frame may be anything.
        assert reached == at or (codec == "zstd" and reached == BLOCKS)
        assert store_chain(store, worker.namespace, hashes, compressible=True)
        assert load_chain(store, worker.namespace, hashes, compressible=True) == BLOCKS


@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
@pytest.mark.parametrize("damage", ["truncate", "empty", "delete"])
def test_a_payload_file_that_is_cut_or_gone_is_a_miss_and_heals(tmp_path, caplog, running, damage):
    caplog.set_level(logging.WARNING)
    store = open_store(tmp_path)
    worker, hashes = stored(store)
    if running:
        push_out(store, worker)
    else:
        store.close()
    for file in payload_files(tmp_path):
        if damage == "delete":
            file.unlink()
        else:
            os.truncate(file, 40960 if damage == "truncate" else 0)
    if not running:
        store = open_store(tmp_path)
        worker = Conversation(store)
    with store:
        reached = load_chain(store, worker.namespace, hashes)
        assert reached < BLOCKS
        counters = store.status().counters
        assert counters.get("checksum_failures", 0) + counters.get("lost_payloads", 0) > 0
        assert re.search("truncated or deleted|was deleted|ends at|payloads_lost", caplog.text)
        if damage == "delete":
            # All that went with the file is known by now or soon, not only what was asked for.
            while (
                worker.match(tokens(1, BLOCKS)).stored_blocks or worker.match(tokens(100, 40)).stored_blocks
            ):
                pass
        assert store.check() == []
        assert stored_again(store, worker.namespace, hashes)
        assert load_chain(store, worker.namespace, hashes) == BLOCKS
        push_out(store, worker)
    with open_store(tmp_path) as store:
        assert load_chain(store, worker.namespace, hashes) == BLOCKS


def test_a_worker_whose_commit_is_refused_leaves_nothing_that_others_would_wait_for(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        hashes = block_hashes(worker.namespace, tokens(1, BLOCKS))
        with pytest.raises(InvalidArgument):
            store_chain(store, worker.namespace, hashes, end_of(hashes, UnitKind(0)))
        assert store.status().leases == 0
        assert store_chain(store, worker.namespace, hashes)
        assert load_chain(store, worker.namespace, hashes) == BLOCKS


def test_a_catalogue_that_is_gone_leaves_an_empty_store_without_rubbish(tmp_path):
    with open_store(tmp_path) as store:
        worker, hashes = stored(store)
    (tmp_path / "catalog" / "data.mdb").unlink()
    with open_store(tmp_path) as store:
        assert not (tmp_path / "payloads" / str(SIZE)).exists()
        worker, hashes = stored(store)
        assert load_chain(store, worker.namespace, hashes) == BLOCKS


def test_a_disk_that_cannot_be_read_now_is_a_miss_and_nothing_is_dropped(tmp_path, caplog):
    faults = faulty()
    with open_store(tmp_path, faults) as store:
        worker, hashes = stored(store)
        push_out(store, worker)
        faults.fail_reads = True
        with caplog.at_level(logging.WARNING):
            assert load_chain(store, worker.namespace, hashes) == 0
        assert store.status().counters["read_errors"] > 0
        assert "read_errors" in caplog.text
        assert store.check() == []
        faults.fail_reads = False
        assert load_chain(store, worker.namespace, hashes) == BLOCKS


def test_blocks_that_cannot_be_freed_are_freed_later(tmp_path):
    faults = faulty()
    with open_store(tmp_path, faults) as store:
        worker, hashes = stored(store)
    flip(tmp_path, content(hashes[0], SIZE), 0)
    with open_store(tmp_path, faults) as store:
        worker = Conversation(store)
        faults.fail_frees = True
        assert load_chain(store, worker.namespace, hashes) == 0
        assert not store_chain(store, worker.namespace, hashes)
        assert store.status().mode == "host_only"
        assert load_chain(store, worker.namespace, hashes) == BLOCKS
        faults.fail_frees = False
        for seed in itertools.count(2):
            if store_chain(store, worker.namespace, block_hashes(worker.namespace, tokens(seed, 4))):
                break
        assert store.status().mode == "ok"
    with open_store(tmp_path) as store:
        assert load_chain(store, worker.namespace, hashes) == BLOCKS


async def opened(path, faults=None):
    store = await Store.open(settings(path), (faults or faulty()).open)
    return store, await store.open_namespace(Namespace(layout=SMALL))


async def evicted(store, holder, namespace, seed=1, blocks=BLOCKS):
    """A chain that is on disk only."""
    hashes = block_hashes(namespace, tokens(seed, blocks))
    assert await store.durable(await put(store, holder, namespace, hashes))
    for other in range(100, 103):
        assert await store.durable(
            await put(store, holder, namespace, block_hashes(namespace, tokens(other, 40)))
        )
    match = store.match(namespace, hashes, 64 * blocks + 1, align=64, store=False)
    assert match.disk_blocks == blocks
    return hashes


async def drain(stream, hashes):
    """Leading blocks that come, every byte checked."""
    reached = None
    while batch := await stream.next():
        for index, _ in batch:
            assert stream.view(index) == content(hashes[index], SIZE)
        stream.give_back([index for index, _ in batch])
        reached = batch[-1][0] + 1
    return reached


@in_loop
async def test_loads_at_the_same_time_read_the_disk_once(tmp_path):
    faults = faulty()
    store, namespace = await opened(tmp_path, faults)
    workers = [store.connect(bytes([n]) * 16, mapped=True) for n in range(3)]
    hashes = await evicted(store, workers[0], namespace)
    faults.read_gate.clear()
    streams = [store.load(worker, namespace, hashes, 0) for worker in workers]
    tasks = [asyncio.create_task(drain(stream, hashes)) for stream in streams]
    await until(lambda: faults.reads >= 4)
    faults.read_gate.set()
    assert await asyncio.gather(*tasks) == [BLOCKS] * 3
    for stream in streams:
        stream.close(returned=True)
    assert store.counters["disk_read_blocks"] == BLOCKS
    assert store.check() == []
    await store.close()


@in_loop
async def test_a_load_that_is_given_up_leaves_its_blocks_to_the_others(tmp_path):
    faults = faulty()
    store, namespace = await opened(tmp_path, faults)
    one, two = (store.connect(bytes([n]) * 16, mapped=True) for n in range(2))
    hashes = await evicted(store, one, namespace)
    faults.read_gate.clear()
    given_up, kept = (store.load(worker, namespace, hashes, 0) for worker in (one, two))
    step = asyncio.create_task(given_up.next())
    other = asyncio.create_task(drain(kept, hashes))
    await until(lambda: faults.reads >= 4)
    step.cancel()
    await asyncio.wait({step})
    given_up.close(returned=False)
    faults.read_gate.set()
    assert await other == BLOCKS
    kept.close(returned=True)
    assert store.counters["disk_read_blocks"] == BLOCKS
    assert one.held_bytes == two.held_bytes == 0
    await until(lambda: store._host.reading() == 0)
    assert store.check() == []
    index = store._index
    assert all(store.arena.holders(index.slot[row]) == 0 for row in index if index.slot[row] >= 0)
    assert all(index.holds[row] == 0 for row in index)
    await store.close()


@in_loop
async def test_a_load_with_a_corrupt_middle_ends_there(tmp_path):
    store, namespace = await opened(tmp_path)
    worker = store.connect(b"a" * 16, mapped=True)
    hashes = await evicted(store, worker, namespace, blocks=40)
    flip(tmp_path, content(hashes[25], SIZE), 100)
    stream = store.load(worker, namespace, hashes, 0)
    assert await drain(stream, hashes) == 25
    assert stream.short == 25
    assert await stream.next() == []
    stream.close(returned=True)
    assert worker.held_bytes == 0
    assert store.check() == []
    await store.close()


@in_loop
async def test_a_load_that_learns_late_of_a_corrupt_block_spoils_nobodys_healing(tmp_path):
    faults = faulty()
    store, namespace = await opened(tmp_path, faults)
    one, two, healer = (store.connect(bytes([n]) * 16, mapped=True) for n in range(3))
    hashes = await evicted(store, one, namespace)
    flip(tmp_path, content(hashes[0], SIZE), 0)
    faults.read_gate.clear()
    first, second = (store.load(worker, namespace, hashes, 0) for worker in (one, two))
    quick, slow = asyncio.create_task(first.next()), asyncio.create_task(second.next())
    await until(lambda: faults.reads >= 4)
    slow.cancel()  # its worker is not waiting when the read fails
    await asyncio.wait({slow})
    faults.read_gate.set()
    assert await quick == []
    assert first.short == 0
    reserved = store.reserve(healer, namespace, ROOT, hashes[:1], 0)
    assert reserved.states == [ReserveState.FILL]
    assert await second.next() == []
    assert second.short == 0
    store.arena.memory[reserved.offsets[0] : reserved.offsets[0] + SIZE] = content(hashes[0], SIZE)
    store.commit(healer, reserved.lease, hashes[:1], [])
    for stream in (first, second):
        stream.close(returned=True)
    assert store.check() == []
    assert await drain(store.load(one, namespace, hashes, 0), hashes) == BLOCKS
    await store.close()


@in_loop
async def test_a_load_never_announces_a_block_that_another_worker_fills_again(tmp_path):
    store, namespace = await opened(tmp_path)
    one, two = (store.connect(bytes([n]) * 16, mapped=True) for n in range(2))
    hashes = await evicted(store, one, namespace, blocks=40)
    flip(tmp_path, content(hashes[30], SIZE), 0)
    stream = store.load(one, namespace, hashes, 0)
    batch = await stream.next()
    finder = store.load(two, namespace, hashes, 30)
    assert await finder.next() == []
    finder.close(returned=True)
    reserved = store.reserve(two, namespace, hashes[29], hashes[30:31], 0)
    assert reserved.states == [ReserveState.FILL]
    stream.give_back([index for index, _ in batch])
    assert await drain(stream, hashes) == 30
    assert stream.short == 30
    stream.close(returned=True)
    store.release(two, reserved.lease)
    assert store.check() == []
    await store.close()


@in_loop
async def test_a_mark_that_is_written_while_its_block_is_lost_is_not_given_to_another_block(tmp_path):
    faults = faulty()
    store, namespace = await opened(tmp_path, faults)
    worker, other = (store.connect(bytes([n]) * 16, mapped=True) for n in range(2))
    hashes = await evicted(store, worker, namespace, blocks=1)
    faults.write_gate.clear()
    lease = store.reserve(worker, namespace, ROOT, hashes, 0).lease
    store.commit(worker, lease, [], end_of(hashes))
    store.release(worker, lease)
    begun = faults.writes
    await put(store, other, namespace, block_hashes(namespace, tokens(3, 2)))
    await until(lambda: faults.writes > begun)  # the mark goes along with this batch
    flip(tmp_path, content(hashes[0], SIZE), 9)
    stream = store.load(worker, namespace, hashes, 0)
    assert await stream.next() == []
    stream.close(returned=True)
    news = block_hashes(namespace, tokens(4, 4))
    ticket = await put(store, other, namespace, news)
    faults.write_gate.set()
    assert await store.durable(ticket)
    assert store.match(namespace, hashes, 65, align=64, store=False).reason is not MissReason.NONE
    assert store.check() == []
    await store.close()
    store, namespace = await opened(tmp_path)
    assert store.match(namespace, hashes, 65, align=64, store=False).blocks == 0
    assert store.match(namespace, news, 257, align=64, store=False).blocks == 4
    await store.close()


@in_loop
async def test_a_place_is_freed_once_the_catalogue_has_forgotten_it(tmp_path):
    faults = faulty()
    store, namespace = await opened(tmp_path, faults)
    worker = store.connect(b"a" * 16, mapped=True)
    hashes = await evicted(store, worker, namespace, blocks=1)
    flip(tmp_path, content(hashes[0], SIZE), 0)
    faults.free_gate.clear()
    begun = faults.free_gate.arrived
    stream = store.load(worker, namespace, hashes, 0)
    assert await stream.next() == []
    stream.close(returned=True)
    await until(lambda: faults.free_gate.arrived > begun)
    named = {block for chunk in store._disk.catalog.blocks() for block in chunk["hash"].tolist()}
    faults.free_gate.set()
    assert len(named) == 120
    assert hashes[0] not in named
    await store.close()


# --- directories


def test_a_directory_in_use_is_refused_and_names_the_holder(tmp_path):
    with open_store(tmp_path) as store:
        worker, hashes = stored(store)
        with pytest.raises(DataDirInUse, match=str(os.getpid())):
            open_store(tmp_path)
        assert load_chain(store, worker.namespace, hashes) == BLOCKS
    open_store(tmp_path).close()


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirError, match="file"):
        open_store(tmp_path / "file" / "data")


def test_another_format_version_is_refused_and_left_alone(tmp_path):
    with open_store(tmp_path) as store:
        worker, hashes = stored(store)
    with lmdb.open(str(tmp_path / "catalog"), max_dbs=4) as env, env.begin(write=True) as txn:
        txn.put(b"format", b"99", db=env.open_db(b"info", txn))
    with pytest.raises(FormatMismatch, match="99"):
        open_store(tmp_path)
    with lmdb.open(str(tmp_path / "catalog"), max_dbs=4) as env, env.begin(write=True) as txn:
        txn.put(b"format", b"2", db=env.open_db(b"info", txn))
    with open_store(tmp_path) as store:  # the refusal gave the directory up, and changed nothing
        assert load_chain(store, worker.namespace, hashes) == BLOCKS


def test_a_directory_of_the_first_format_is_taken_over(tmp_path):
    """It had no notes."""
    with open_store(tmp_path) as store:
        worker, hashes = stored(store)
    with lmdb.open(str(tmp_path / "catalog"), max_dbs=5) as env, env.begin(write=True) as txn:
        txn.put(b"format", b"1", db=env.open_db(b"info", txn))
        txn.drop(env.open_db(b"notes", txn))
    with open_store(tmp_path) as store:
        assert load_chain(store, worker.namespace, hashes) == BLOCKS
    with lmdb.open(str(tmp_path / "catalog"), max_dbs=5) as env, env.begin() as txn:
        assert bytes(txn.get(b"format", db=env.open_db(b"info", txn))) == b"2"


def test_a_store_that_cannot_open_gives_the_directory_up(tmp_path):
    with open_store(tmp_path) as store:
        stored(store)
    faults = faulty()

    def refuse(path, map_bytes, block_bytes, first_free):
        raise DiskError("injected: no payloads")

    faults.inner = refuse
    with pytest.raises(DiskError, match="injected"):
        open_store(tmp_path, faults)
    open_store(tmp_path).close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"disk_bytes": 16 * MIB}, "disk"), ({"disk_bytes": 512 * MIB, "host_bytes": MIB}, "arena")],
)
def test_a_tier_smaller_than_a_block_is_refused(tmp_path, changes, said):
    with open_store(tmp_path, **changes) as store:
        with pytest.raises(CapacityTooSmall, match=f"(?s){said}.*(raise|give)"):
            store.open_namespace(Namespace(layout=DEEPSEEK_V3))
        worker, hashes = stored(store)  # others are served
        assert load_chain(store, worker.namespace, hashes) == BLOCKS


def test_a_namespace_that_no_longer_fits_is_closed_and_comes_back(tmp_path):
    wide = SMALL.__class__(num_layers=200, latent_rank=32, rope_dim=16)
    with open_store(tmp_path, host_bytes=8 * MIB, disk_bytes=64 * MIB) as store:
        namespace = store.open_namespace(Namespace(layout=wide))
        hashes = block_hashes(namespace, tokens(1, 3))
        store_chain(store, namespace, hashes, nbytes=wide.block_bytes)
        worker, small = stored(store)
    with open_store(tmp_path, host_bytes=MIB, disk_bytes=64 * MIB) as store:
        assert load_chain(store, worker.namespace, small) == BLOCKS
    with open_store(tmp_path, host_bytes=8 * MIB, disk_bytes=64 * MIB) as store:
        assert load_chain(store, namespace, hashes) == 3


def test_payloads_larger_than_a_disk_that_shrank_are_given_up(tmp_path):
    """Their file cannot shrink, so there is no other way to stay within the capacity."""
    with open_store(tmp_path, disk_bytes=64 * MIB) as store:
        worker = Conversation(store)
        for seed in range(40):
            store_chain(store, worker.namespace, block_hashes(worker.namespace, tokens(seed, 40)))
    with open_store(tmp_path, disk_bytes=16 * MIB) as store:
        assert store.status().counters["lost_payloads"] == 1600
        worker, hashes = stored(store)
        assert sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*")) <= 16 * MIB
        assert load_chain(store, worker.namespace, hashes) == BLOCKS


def test_a_disk_that_shrank_is_obeyed_from_the_start(tmp_path):
    with open_store(tmp_path, disk_bytes=32 * MIB) as store:
        worker, wide = Conversation(store), Conversation(store, OTHER)
        for seed in range(18):
            store_chain(store, worker.namespace, block_hashes(worker.namespace, tokens(seed, 40)))
            hashes = block_hashes(wide.namespace, tokens(seed, 12))
            store_chain(store, wide.namespace, hashes, nbytes=OTHER.block_bytes)
        assert store.status().disk.used_bytes > 16 * MIB
    with open_store(tmp_path, disk_bytes=16 * MIB) as store:
        assert store.status().disk.used_bytes <= 16 * MIB
        assert store.status().counters["disk_evicted_blocks"] > 0
        assert load_chain(store, wide.namespace, hashes) == 12
        assert store.check() == []


def test_a_defect_below_a_read_costs_a_miss_and_keeps_no_slot(tmp_path, caplog):
    """Any exception, even one that nobody foresaw."""

    def defective(*args):
        payloads = OPEN[CHOSEN["payloads"]](*args)

        def read_into(place, run):
            raise ZeroDivisionError("a defect")

        payloads.read_into = read_into
        return payloads

    with open_store(tmp_path) as store:
        worker, hashes = stored(store)
    with Embedded(settings(tmp_path), defective) as store:
        assert load_chain(store, worker.namespace, hashes) == 0
        assert "event=read_failed" in caplog.text
        assert store.status().host.used_bytes == 0
        assert store.check() == []
    with open_store(tmp_path) as store:
        assert load_chain(store, worker.namespace, hashes) == BLOCKS


def test_a_file_where_payloads_of_a_size_should_be_is_named_in_the_refusal(tmp_path):
    with open_store(tmp_path) as store:
        worker, hashes = stored(store)
    in_the_way = tmp_path / "payloads" / "4096"
    in_the_way.write_text("not ours")
    with pytest.raises(DiskError, match=f"{in_the_way} cannot be removed.*by hand"):
        open_store(tmp_path)
    in_the_way.unlink()
    with open_store(tmp_path) as store:
        assert load_chain(store, worker.namespace, hashes) == BLOCKS
