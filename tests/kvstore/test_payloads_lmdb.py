"""What only LMDB payloads do: keys that only rise, recorded pages, and damage to LMDB's own pages."""

import os
import random
import re
import shutil
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.errors import CorruptBlock, DiskError, InvalidArgument
from kvstore.payloads import Place
from kvstore.payloads.direct import PAGE_BYTES, Run
from kvstore.payloads.lmdb import KEY, LmdbPayloads
from kvstore.testing.payload_conformance import body

MAP = 16 << 20
SIZE = 100_000


def write(store, *seeds, nbytes=SIZE):
    return store.write([Run.of(store.lead, body(seed, nbytes)) for seed in seeds])


def read(store, place, nbytes=SIZE):
    run = Run.fresh(store.lead, nbytes)
    store.read_into(place, run)
    return bytes(run.payload)


def fill(store, nbytes, batch):
    places = []
    while True:
        try:
            places += write(store, *range(batch), nbytes=nbytes)
        except DiskError:
            return places


def keys_of(places):
    return [place.key for place in places]


@pytest.fixture
def store(tmp_path):
    made = LmdbPayloads(tmp_path / "p", MAP)
    yield made
    made.close()


def test_a_key_is_never_given_out_twice(tmp_path):
    seen: set[int] = set()
    for _ in range(4):
        store = LmdbPayloads(tmp_path / "p", MAP)
        keys = keys_of(write(store, 1, 1, 1, nbytes=5000))
        assert not seen & set(keys)
        assert keys == sorted(keys)
        seen |= set(keys)
        store.free(keys)
        store.close()


def test_keys_start_behind_all_that_the_catalogue_knows(tmp_path):
    store = LmdbPayloads(tmp_path / "p", MAP, first_free=1000)
    assert keys_of(write(store, 1)) == [1000]
    store.close()


@pytest.mark.parametrize(
    ("size", "batch", "map_bytes"), [(4096, 256, 64 << 20), (SIZE, 8, MAP), (1 << 20, 1, MAP)]
)
def test_after_it_was_full_freed_space_comes_back_every_time(tmp_path, size, batch, map_bytes):
    store = LmdbPayloads(tmp_path / "p", map_bytes)
    first = len(places := fill(store, size, batch))
    for _ in range(3):
        store.free(keys_of(places))
        assert list(store.keys()) == []
        places = fill(store, size, batch)
        assert len(places) > 0.85 * first
    store.close()


def test_at_the_brim_each_large_payload_that_is_freed_makes_room_for_the_next(store):
    places = fill(store, 1 << 20, batch=1)
    rng = random.Random(5)
    for turn in range(30):
        store.free([places.pop(rng.randrange(len(places))).key])
        (place,) = write(store, turn, nbytes=1 << 20)
        assert read(store, place, 1 << 20) == body(turn, 1 << 20)
        places.append(place)
    assert sorted(store.keys()) == sorted(keys_of(places))


# --- pages


@pytest.mark.parametrize("name", ["p", "a name with spaces (deleted)", "\u00e4\n"])
def test_the_recorded_page_is_where_the_payload_lies_in_the_file(tmp_path, name):
    store = LmdbPayloads(tmp_path / name, MAP)
    other = LmdbPayloads(tmp_path / f"{name} too", MAP)
    content = (tmp_path / name / "data.mdb").open("rb")
    for turn in range(5):  # freed pages are used again, in another order
        places = write(store, *range(turn, turn + 8))
        write(other, 99)
        for seed, place in enumerate(places, turn):
            content.seek(place.page * PAGE_BYTES + store.lead)
            assert content.read(SIZE) == body(seed, SIZE)
        store.free(keys_of(places[::2]))
    content.close()
    store.close()
    other.close()


def test_a_payload_stays_on_its_page_until_it_is_freed(store):
    kept = write(store, *range(8))
    rng = random.Random(2)
    others = []
    for turn in range(60):
        others += write(store, turn, turn)
        store.free([others.pop(rng.randrange(len(others))).key for _ in range(1 + turn % 3) if others])
        for seed, place in enumerate(kept):
            assert read(store, place) == body(seed, SIZE)


@pytest.mark.parametrize("nbytes", [1, 100, 1000, 1900])
def test_small_payloads_lie_inside_a_page_and_are_read_without_one(store, nbytes):
    places = write(store, *range(50), nbytes=nbytes)
    assert {place.page for place in places} == {0}
    for seed, place in enumerate(places):
        assert read(store, place, nbytes) == body(seed, nbytes)


def test_a_wrong_page_is_wrong_bytes_and_the_key_alone_is_right(store):
    one, two = write(store, 1, 2)
    crossed = Place(one.key, two.page)
    assert read(store, crossed) == body(2, SIZE)  # which a checksum tells
    assert read(store, Place(one.key)) == body(1, SIZE)
    with pytest.raises(CorruptBlock, match="ends at"):
        read(store, Place(one.key, MAP // PAGE_BYTES - 1))


def test_pages_of_a_replaced_file_are_not_believed_of_the_new_one(store, tmp_path):
    old = write(store, 1, 2)
    (tmp_path / "p" / "data.mdb").unlink()
    new = write(store, 3, 4)
    assert store.replaced == 1
    for place in old:
        assert read(store, place) != body(1, SIZE)
        with pytest.raises(CorruptBlock, match="is missing"):
            read(store, Place(place.key))
    assert [read(store, place) for place in new] == [body(3, SIZE), body(4, SIZE)]


def test_listing_keys_touches_no_payload(tmp_path):
    store = LmdbPayloads(tmp_path / "p", MAP)
    places = write(store, *range(12), nbytes=1 << 20)
    store.close()
    code = f"""
import re, sys
from pathlib import Path
from kvstore.payloads.lmdb import KEY, LmdbPayloads
path = Path({str(tmp_path / "p")!r})
store = LmdbPayloads(path, {MAP})
assert len(list(store.keys())) == {len(places)}
maps = Path("/proc/self/smaps").read_text().split(str(path / "data.mdb"))[1]
print(re.search(r"Rss: +(\\d+) kB", maps)[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * 1024  # KiB, of 12 MiB; the kernel maps neighbours too


@pytest.mark.parametrize("size", [3000, 4096, 5000, 8176, 100_000])
def test_stored_bytes_is_what_a_payload_takes_or_a_page_more(store, size):
    count = 64
    before = store.file_bytes()
    write(store, *[1] * count, nbytes=size)
    taken = store.file_bytes() - before
    assert taken - 16 * 4096 <= count * store.stored_bytes(size) <= taken + count * 4096


def test_a_map_too_small_for_anything_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="map_bytes=4096"):
        LmdbPayloads(tmp_path, 4096)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.99])
def test_a_truncated_file_gives_no_payload_until_a_write_replaces_it(store, tmp_path, share):
    places = write(store, *range(20))
    os.truncate(tmp_path / "p" / "data.mdb", int(store.file_bytes() * share))
    for place in places:
        with pytest.raises(CorruptBlock, match="truncated or deleted"):
            read(store, place)
    assert store.missing(keys_of(places)) == set(keys_of(places))
    fresh = write(store, 30)
    assert store.replaced == 1
    assert read(store, fresh[0]) == body(30, SIZE)
    assert not set(keys_of(fresh)) & set(keys_of(places))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pages_overwritten_at_rest_give_misses_or_wrong_bytes_but_no_other_error(tmp_path, data):
    path = tmp_path / "p"
    shutil.rmtree(path, ignore_errors=True)
    store = LmdbPayloads(path, MAP)
    places = write(store, *range(20))
    pages = store.file_bytes() // 4096
    store.close()
    with open(path / "data.mdb", "r+b") as file:
        for page in data.draw(st.lists(st.integers(0, pages - 1), max_size=pages)):
            file.seek(page * 4096)
            file.write(bytes(4096))
    store = LmdbPayloads(path, MAP, first_free=places[-1].key + 1)
    for place in places:
        for at in (place, Place(place.key)):
            try:
                assert len(read(store, at)) == SIZE
            except CorruptBlock:
                continue
    fresh = write(store, 7, 8)
    assert not set(keys_of(fresh)) & set(keys_of(places))
    assert [read(store, place) for place in fresh] == [body(7, SIZE), body(8, SIZE)]
    store.close()


def test_a_list_of_keys_that_leads_back_to_where_it_was_is_refused(tmp_path):
    store = LmdbPayloads(tmp_path / "p", MAP)
    keys = keys_of(write(store, *range(600), nbytes=16))
    store.close()
    file = tmp_path / "p" / "data.mdb"
    content = bytearray(file.read_bytes())
    first, last = (page_of_two_keys(content, key) for key in (keys[0], keys[-2]))
    content[last + 8 : last + PAGE_BYTES] = content[first + 8 : first + PAGE_BYTES]  # behind its number
    file.write_bytes(content)
    store = LmdbPayloads(tmp_path / "p", MAP)
    with pytest.raises(DiskError, match="do not rise"):
        store.keys()
    store.close()


def page_of_two_keys(content, key):
    """The page on which a key and the next one have nothing but a header between them."""
    pattern = re.escape(KEY.pack(key + 1)) + b".{8}" + re.escape(KEY.pack(key))
    return re.search(pattern, content, re.DOTALL).start() // PAGE_BYTES * PAGE_BYTES


def test_a_disk_that_refuses_a_read_is_an_error_and_no_missing_payload(store, tmp_path):
    (place,) = write(store, 1)
    refusing = os.open(tmp_path, os.O_RDONLY)  # a directory: each read of it is refused
    os.dup2(refusing, store._env.direct.fd)
    with pytest.raises(DiskError, match=f"payload {place.key} in .* cannot be read"):
        read(store, place)
    os.close(refusing)
    assert read(store, Place(place.key)) == body(1, SIZE)  # through LMDB's map, which is well
    assert store.missing([place.key]) == set()


def test_a_file_that_was_cut_says_that_all_is_missing_and_lists_nothing(store, tmp_path):
    places = write(store, 1, 2)
    os.truncate(tmp_path / "p" / "data.mdb", 8192)
    assert store.missing(keys_of(places)) == set(keys_of(places))
    with pytest.raises(DiskError, match="truncated or deleted"):
        store.retain(keys_of(places))
