import os
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.errors import CorruptBlock, DiskError, InvalidArgument
from kvstore.payloads import Payloads
from kvstore.payloads.lmdb import LmdbPayloads

MAP = 16 << 20
SIZE = 100_000


def body(seed: int, size: int = SIZE) -> bytes:
    return random.Random(seed).randbytes(size)


def read(store: Payloads, place: int, size: int = SIZE) -> bytes:
    out = bytearray(size)
    store.read_into(place, size, memoryview(out))
    return bytes(out)


def fill(store: Payloads, size: int = SIZE, batch: int = 8) -> list[int]:
    """Write until the store is full."""
    places: list[int] = []
    items = [body(i, size) for i in range(batch)]
    while True:
        try:
            places += store.write(items)
        except DiskError:
            return places


@pytest.fixture
def store(tmp_path):
    made = LmdbPayloads(tmp_path / "p", MAP)
    yield made
    made.close()


def test_what_is_written_is_read_back_in_order(store):
    items = [body(1), bytearray(body(2)), memoryview(body(3))]
    places = store.write(items)
    assert [read(store, place) for place in places] == [bytes(item) for item in items]
    assert list(store.places()) == places == sorted(places)


def test_it_is_all_there_after_reopening(tmp_path):
    store = LmdbPayloads(tmp_path / "p", MAP)
    places = store.write([body(1), body(2)])
    store.close()
    store = LmdbPayloads(tmp_path / "p", MAP)
    assert read(store, places[1]) == body(2)
    assert store.write([body(3)]) > places
    store.close()
    store.close()


def test_a_missing_payload_and_one_of_another_length_are_corrupt(store):
    (place,) = store.write([body(1)])
    with pytest.raises(CorruptBlock, match=f"payload {place + 1} .* is missing"):
        read(store, place + 1)
    with pytest.raises(CorruptBlock, match=f"has {SIZE} bytes; expected {SIZE + 1}"):
        read(store, place, SIZE + 1)
    with pytest.raises(CorruptBlock, match="exceeds"):
        store.read_into(place, SIZE, memoryview(bytearray(SIZE - 1)))


def test_a_read_writes_nothing_behind_its_length(store):
    (place,) = store.write([body(1, 5000)])
    out = bytearray(8192)
    store.read_into(place, 5000, memoryview(out))
    assert out[:5000] == body(1, 5000)
    assert not any(out[5000:])


def test_writing_or_freeing_nothing_changes_nothing(store):
    assert store.write([]) == []
    store.free([])
    store.free([0, 12345])
    assert list(store.places()) == []


def test_a_place_is_never_given_out_twice(tmp_path):
    seen: set[int] = set()
    for _ in range(4):
        store = LmdbPayloads(tmp_path / "p", MAP)
        places = store.write([body(1, 5000)] * 3)
        assert not seen & set(places)
        seen |= set(places)
        store.free(places)
        store.close()


def test_places_start_behind_all_that_the_catalogue_knows(tmp_path):
    store = LmdbPayloads(tmp_path / "p", MAP, first_free=1000)
    assert store.write([body(1)]) == [1000]
    store.close()


def test_a_full_store_refuses_the_whole_batch_and_keeps_what_it_had(store):
    places = fill(store)
    with pytest.raises(DiskError, match=r"full|MAP_FULL"):
        store.write([body(1)] * 8)
    assert list(store.places()) == places
    assert read(store, places[9]) == body(1)
    assert len(places) * store.stored_bytes(SIZE) > 0.85 * MAP
    assert store.file_bytes() <= MAP


@pytest.mark.parametrize(
    ("size", "batch", "map_bytes"), [(4096, 256, 64 << 20), (SIZE, 8, MAP), (1 << 20, 1, MAP)]
)
def test_after_it_was_full_freed_space_comes_back_every_time(tmp_path, size, batch, map_bytes):
    store = LmdbPayloads(tmp_path / "p", map_bytes)
    first = len(places := fill(store, size, batch))
    for _ in range(3):
        store.free(places)
        assert list(store.places()) == []
        places = fill(store, size, batch)
        assert len(places) > 0.85 * first
    store.close()


@pytest.mark.parametrize(("size", "turns"), [(SIZE, 100), (1 << 20, 30)])
def test_at_the_brim_each_freed_payload_makes_room_for_the_next(store, size, turns):
    places = fill(store, size, batch=1)
    rng = random.Random(5)
    for turn in range(turns):
        store.free([places.pop(rng.randrange(len(places)))])
        (place,) = store.write([body(turn, size)])
        assert read(store, place, size) == body(turn, size)
        places.append(place)
    assert sorted(store.places()) == sorted(places)


def test_listing_places_touches_no_payload(tmp_path):
    store = LmdbPayloads(tmp_path / "p", MAP)
    places = store.write([body(i, 1 << 20) for i in range(12)])
    store.close()
    code = f"""
import re, sys
from pathlib import Path
from kvstore.payloads.lmdb import LmdbPayloads
path = Path({str(tmp_path / "p")!r})
store = LmdbPayloads(path, {MAP})
assert len(list(store.places())) == {len(places)}
maps = Path("/proc/self/smaps").read_text().split(str(path / "data.mdb"))[1]
print(re.search(r"Rss: +(\\d+) kB", maps)[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * 1024  # KiB, of 12 MiB; the kernel maps neighbours too


def test_many_threads_read_beside_the_writer(store):
    places = store.write([body(i) for i in range(16)])
    with ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(read, store, places[i % 16]) for i in range(400)]
        for _ in range(10):
            store.free(store.write([body(99)] * 4))
        for i, done in enumerate(reads):
            assert done.result() == body(i % 16)


@pytest.mark.parametrize("size", [3000, 4096, 5000, 8176, 100_000])
def test_stored_bytes_is_what_a_payload_takes_or_a_page_more(store, size):
    count = 64
    before = store.file_bytes()
    store.write([body(1, size)] * count)
    taken = store.file_bytes() - before
    assert taken - 16 * 4096 <= count * store.stored_bytes(size) <= taken + count * 4096


def test_a_map_too_small_for_anything_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="map_bytes=4096"):
        LmdbPayloads(tmp_path, 4096)


def test_files_that_cannot_be_opened_are_a_disk_error(tmp_path):
    (tmp_path / "p").write_text("a file where the directory should be")
    with pytest.raises(DiskError, match="cannot be opened"):
        LmdbPayloads(tmp_path / "p", MAP)


def heals(store: LmdbPayloads, old: list[int]) -> None:
    """It takes new payloads at new places, and keeps them over a restart."""
    places = store.write([body(7), body(8)])
    assert not set(places) & set(old)
    assert [read(store, place) for place in places] == [body(7), body(8)]
    store.close()
    store = LmdbPayloads(store._path, MAP, first_free=max(old) + 1)
    assert [read(store, place) for place in places] == [body(7), body(8)]
    store.close()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.99])
def test_a_file_truncated_while_closed_is_missing_payloads_and_heals(tmp_path, share):
    store = LmdbPayloads(tmp_path / "p", MAP)
    places = store.write([body(i) for i in range(20)])
    used = store.file_bytes()
    store.close()
    os.truncate(tmp_path / "p" / "data.mdb", int(used * share))
    store = LmdbPayloads(tmp_path / "p", MAP, first_free=places[-1] + 1)
    assert list(store.places()) == []
    for place in places:
        with pytest.raises(CorruptBlock):
            read(store, place)
    heals(store, places)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_a_file_truncated_while_open_kills_nobody_and_heals(store, tmp_path, share):
    places = store.write([body(i) for i in range(20)])
    os.truncate(tmp_path / "p" / "data.mdb", int(store.file_bytes() * share))
    for place in places:
        with pytest.raises(CorruptBlock, match="truncated or deleted"):
            read(store, place)
    heals(store, places)
    assert store.replaced == 1


def test_a_file_deleted_while_open_heals_with_the_next_write(store, tmp_path):
    places = store.write([body(1), body(2)])
    (tmp_path / "p" / "data.mdb").unlink()
    with pytest.raises(CorruptBlock):
        read(store, places[0])
    heals(store, places)


def test_a_deleted_directory_is_missing_payloads_and_heals(tmp_path):
    store = LmdbPayloads(tmp_path / "p", MAP)
    places = store.write([body(1), body(2)])
    store.close()
    shutil.rmtree(tmp_path / "p")
    store = LmdbPayloads(tmp_path / "p", MAP, first_free=places[-1] + 1)
    with pytest.raises(CorruptBlock, match="is missing"):
        read(store, places[0])
    heals(store, places)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pages_overwritten_at_rest_give_misses_or_wrong_bytes_but_no_other_error(tmp_path, data):
    path = tmp_path / "p"
    shutil.rmtree(path, ignore_errors=True)
    store = LmdbPayloads(path, MAP)
    places = store.write([body(i) for i in range(20)])
    pages = store.file_bytes() // 4096
    store.close()
    with open(path / "data.mdb", "r+b") as file:
        for page in data.draw(st.lists(st.integers(0, pages - 1), max_size=pages)):
            file.seek(page * 4096)
            file.write(bytes(4096))
    store = LmdbPayloads(path, MAP, first_free=places[-1] + 1)
    for place in places:
        try:
            assert len(read(store, place)) == SIZE
        except CorruptBlock:
            continue
    heals(store, places)


WRITER = """
import sys
from pathlib import Path
from kvstore.payloads.lmdb import LmdbPayloads
store = LmdbPayloads(Path(sys.argv[1]), 16 << 20)
live = list(store.places())
while True:
    print("writing", flush=True)
    places = store.write([bytes([len(live) % 251]) * 50_000] * 4)
    print(*places, flush=True)
    live += places
    if len(live) > 150:
        gone, live = live[:100], live[100:]
        print("free", *gone, flush=True)
        store.free(gone)
"""


def test_payloads_acknowledged_before_a_kill_are_there_and_it_opens_at_once(tmp_path, victim):
    kept: set[int] = set()
    for turn in range(6):
        one = victim(WRITER, str(tmp_path / "p"))
        lines = [one.line() for _ in range(10 + 37 * turn)] + one.kill()
        for line in lines:
            if line.startswith("free"):
                kept -= {int(number) for number in line.split()[1:]}
            elif re.match(r"\d", line):
                kept |= {int(number) for number in line.split()}
        store = LmdbPayloads(tmp_path / "p", MAP)
        assert kept <= set(store.places())
        for place in kept:
            content = read(store, place, 50_000)
            assert content == content[:1] * 50_000
        kept = set(store.places())
        assert store.replaced == 0
        store.close()


def test_the_path_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = LmdbPayloads(Path("p"), MAP)
    assert read(store, store.write([body(1)])[0]) == body(1)
    store.close()
