"""What only slabs do: slots that are used again, preallocation, and giving room to another size."""

import errno
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.errors import CorruptBlock, DiskError, InvalidArgument
from kvstore.payloads import Place
from kvstore.payloads.direct import DirectFile, Run
from kvstore.payloads.slab import RUN_SLOTS, SlabPayloads
from kvstore.testing.payload_conformance import body

SIZE = 100_000
SLOT = 25 * 4096
LIMIT = 16 << 20


def read(store, place, nbytes=SIZE):
    run = Run.fresh(0, nbytes)
    store.read_into(place, run)
    return bytes(run.payload)


def write(store, *seeds, nbytes=SIZE):
    return store.write([Run.of(0, body(seed, nbytes)) for seed in seeds])


def fill(store):
    places = []
    while True:
        try:
            places += write(store, 0)
        except DiskError:
            return places


@pytest.fixture
def path(tmp_path):
    return tmp_path / "p"


@pytest.fixture
def store(path):
    made = SlabPayloads(path, LIMIT, SIZE)
    made.retain(())
    yield made
    made.close()


def test_the_first_write_takes_a_whole_slab_and_the_next_ones_no_more(store, path):
    write(store, 1)
    (file,) = path.iterdir()
    before = file.stat()
    assert before.st_blocks * 512 >= before.st_size == 10 * SLOT
    write(store, *range(9))
    assert (file.stat().st_blocks, file.stat().st_size) == (before.st_blocks, before.st_size)
    write(store, 1)
    assert len(list(path.iterdir())) == 2


def test_freed_slots_are_used_again_first_to_last(store):
    places = write(store, *range(10))
    store.free([places[4].key, places[2].key, places[3].key])
    assert write(store, 20, 21, 22) == places[2:5]
    assert [read(store, place) for place in places] == [
        body(seed, SIZE) for seed in (0, 1, 20, 21, 22, 5, 6, 7, 8, 9)
    ]


def test_a_batch_longer_than_a_run_and_over_several_slabs_is_whole(store):
    seeds = range(5 * RUN_SLOTS)
    for seed, place in zip(seeds, write(store, *seeds), strict=True):
        assert read(store, place) == body(seed, SIZE)


def test_what_the_kernel_tells_one_write_fails_all_that_are_under_way(store, monkeypatch):
    """A page that is lost on its way shows in one fdatasync, which may be that of another write."""
    under_way, go = threading.Event(), threading.Event()
    put, sync = DirectFile.write, DirectFile.sync
    failures = [OSError(errno.EIO, "lost")]

    def write_when_told(file, data, offset):
        put(file, data, offset)
        if bytes(data[0][:SIZE]) == body(1, SIZE):
            under_way.set()
            go.wait(60)

    def fail_once(file):
        if failures:
            raise failures.pop()
        sync(file)

    monkeypatch.setattr(DirectFile, "write", write_when_told)
    monkeypatch.setattr(DirectFile, "sync", fail_once)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(write, store, 1)
        assert under_way.wait(60)
        try:
            with pytest.raises(DiskError, match="lost"):
                write(store, 2)
        finally:
            go.set()
        with pytest.raises(DiskError, match="beside it"):
            slow.result()
    (place,) = write(store, 3)
    assert read(store, place) == body(3, SIZE)


def test_a_freed_slot_is_missing(store):
    (place,) = write(store, 1)
    store.free([place.key])
    with pytest.raises(CorruptBlock, match="missing"):
        read(store, place)


def test_a_slab_without_payloads_is_removed_at_start_or_before_another_is_made(store, path):
    gone = write(store, *range(10))
    kept = write(store, 20)
    store.free([place.key for place in gone])
    write(store, 1, nbytes=SIZE // 2)
    assert sorted(file.name for file in path.iterdir()) == ["slab-4-0", "slab-8-1"]
    store.close()
    again = SlabPayloads(path, LIMIT, SIZE)
    assert again.retain([place.key for place in kept]) == set()
    assert [file.name for file in path.iterdir()] == ["slab-8-1"]
    again.close()


def test_a_store_full_of_one_size_takes_another_when_some_are_freed(store, path):
    rng = random.Random(3)
    old = [(place, SIZE) for place in fill(store)]
    for eighths in (5, 8, 2):
        nbytes = SIZE * eighths // 8
        rng.shuffle(old)
        gone, old = old[: len(old) // 2], old[len(old) // 2 :]
        freed = sum(store.stored_bytes(size) for _, size in gone)
        store.free([place.key for place, _ in gone])
        for _ in range(int(0.8 * freed) // store.stored_bytes(nbytes)):
            old += [(place, nbytes) for place in write(store, 0, nbytes=nbytes)]
        for place, size in old:
            assert read(store, place, size) == body(0, size)
        assert store.file_bytes() <= LIMIT
        store.close()
        store = SlabPayloads(path, LIMIT, SIZE)
        assert store.retain([place.key for place, _ in old]) == set()
    store.close()


def test_files_of_others_are_left_alone(path):
    path.mkdir()
    for name in ("slab-8-0.bak", "slab-9-0", "slab-8-01", "notes"):
        (path / name).write_text("not ours")
    store = SlabPayloads(path, LIMIT, SIZE)
    store.retain(())
    (place,) = write(store, 1)
    assert read(store, place) == body(1, SIZE)
    assert len(list(path.iterdir())) == 5
    store.close()


def test_a_file_that_turns_up_where_a_slab_is_to_be_is_not_taken_for_one(store, path):
    write(store, *range(10))
    (path / "slab-8-1").write_bytes(os.urandom(3 * SLOT))
    (place,) = write(store, 5)
    assert read(store, place) == body(5, SIZE)
    assert (path / "slab-8-1").stat().st_size == 10 * SLOT


def test_a_slab_that_was_cut_short_serves_its_lost_slots_again(store, path):
    places = write(store, *range(10))
    store.close()
    os.truncate(path / "slab-8-0", 4 * SLOT)
    again = SlabPayloads(path, LIMIT, SIZE)
    assert again.retain([place.key for place in places]) == {place.key for place in places[4:]}
    assert write(again, *range(20, 26)) == places[4:]
    assert read(again, places[9]) == body(25, SIZE)
    assert read(again, places[3]) == body(3, SIZE)
    again.close()


def test_a_slab_keeps_its_slots_when_the_limit_changes(store, path):
    places = write(store, *range(25))
    store.close()
    for limit in (64 << 20, LIMIT, 8 << 20):
        again = SlabPayloads(path, limit, SIZE)
        assert again.retain([place.key for place in places]) == set()
        for seed, place in enumerate(places):
            assert read(again, place) == body(seed, SIZE)
        (more,) = write(again, 99)
        assert read(again, more) == body(99, SIZE)
        again.close()


def test_a_disk_full_of_deleted_slabs_still_takes_payloads(store, path):
    places = fill(store)
    for file in path.iterdir():
        file.unlink()
    (place,) = write(store, 5)
    assert read(store, place) == body(5, SIZE)
    assert store.missing([old.key for old in places]) == {old.key for old in places}


def test_a_limit_too_small_for_anything_is_refused(path):
    with pytest.raises(InvalidArgument, match="limit_bytes=4096"):
        SlabPayloads(path, 4096, SIZE)


def test_a_key_that_no_slab_can_have_is_missing(store):
    for key in (0, 7, 1 << 40, (1 << 62) + 5):
        with pytest.raises(CorruptBlock, match="missing"):
            read(store, Place(key))
    store.free([0, 7, 1 << 40])
    assert store.missing([0, 1 << 40]) == {0, 1 << 40}


def test_a_disk_that_refuses_a_read_is_an_error_and_no_missing_payload(store, path):
    one, two = write(store, 1, 2)
    (slab,) = store._slabs[8].values()
    refusing = os.open(path, os.O_RDONLY)  # a directory: each read of it is refused
    well = os.dup(slab.file.fd)
    os.dup2(refusing, slab.file.fd)
    with pytest.raises(DiskError, match=f"payload {one.key} in .* cannot be read"):
        read(store, one)
    os.dup2(well, slab.file.fd)
    os.close(refusing)
    os.close(well)
    assert read(store, two) == body(2, SIZE)
    assert store.missing([two.key]) == set()
