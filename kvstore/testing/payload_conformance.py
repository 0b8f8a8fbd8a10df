"""What every payload store must do, as tests: subclass ``PayloadConformance`` in a test module.

    class TestMine(PayloadConformance):
        def open(self, path, first_free=1):
            return MyPayloads(path, self.limit_bytes, self.block_bytes)

Needs pytest.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.errors import CorruptBlock, DiskError
from kvstore.payloads import Payloads, Place
from kvstore.payloads.direct import PAGE_BYTES, Run


def body(seed: int, nbytes: int) -> bytes:
    """The bytes of a payload."""
    return random.Random(seed).randbytes(nbytes)


class PayloadConformance:
    """Tests of one kind of payload store. ``block_bytes`` and ``limit_bytes`` may be set anew."""

    block_bytes = 100_000
    limit_bytes = 16 << 20
    least_use = 0.85
    """Share of the limit that payloads of a whole block can fill."""

    def open(self, path: Path, first_free: int = 1) -> Payloads:
        """The store in this directory."""
        raise NotImplementedError

    def reopen(self, path: Path, named: Sequence[Place], first_free: int = 1) -> tuple[Payloads, set[int]]:
        """The store as it comes back when the catalogue names these; and what it says is missing."""
        known = max([place.key for place in named], default=0) + 1
        store = self.open(path, max(first_free, known))
        return store, store.retain([place.key for place in named])

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """Directory of ``store``."""
        return tmp_path / "payloads"

    @pytest.fixture
    def store(self, path: Path) -> Iterator[Payloads]:
        """An empty store."""
        made = self.open(path)
        assert made.retain(()) == set()
        yield made
        made.close()

    def write(self, store: Payloads, *seeds: int, nbytes: int = 0) -> list[Place]:
        """Write payloads in one batch."""
        return store.write([Run.of(store.lead, body(seed, nbytes or self.block_bytes)) for seed in seeds])

    def read(self, store: Payloads, place: Place, nbytes: int = 0) -> bytes:
        """Read a payload back."""
        run = Run.fresh(store.lead, nbytes or self.block_bytes)
        store.read_into(place, run)
        return bytes(run.payload)

    def fill(self, store: Payloads, batch: int = 8, nbytes: int = 0) -> list[Place]:
        """Write until the store is full."""
        places: list[Place] = []
        while True:
            try:
                places += self.write(store, *range(batch), nbytes=nbytes)
            except DiskError:
                return places

    def expect(self, store: Payloads, place: Place, seed: int, nbytes: int = 0) -> None:
        """The payload is there, by its page and without."""
        content = body(seed, nbytes or self.block_bytes)
        assert self.read(store, place, nbytes) == content
        assert self.read(store, Place(place.key), nbytes) == content

    def lost(self, store: Payloads, place: Place, seed: int) -> bool:
        """Whether a payload is not what it was, as a caller with a checksum would find."""
        try:
            return self.read(store, place) != body(seed, self.block_bytes)
        except CorruptBlock:
            return True

    def data_files(self, path: Path) -> list[Path]:
        """The files that hold payloads."""
        return [file for file in path.iterdir() if file.name != "lock.mdb"]

    def heals(self, store: Payloads, path: Path) -> None:
        """It takes new payloads and keeps them over a restart."""
        for turn in range(3):
            places = self.write(store, 7, 8)
            for place, seed in zip(places, (7, 8), strict=True):
                self.expect(store, place, seed)
            store.close()
            store, missing = self.reopen(path, places)
            assert not missing, turn
            self.expect(store, places[1], 8)
        store.close()

    # --- what is written is there

    def test_what_is_written_is_read_back_in_order(self, store: Payloads) -> None:
        places = self.write(store, 1, 2, 3)
        for place, seed in zip(places, (1, 2, 3), strict=True):
            self.expect(store, place, seed)
        assert len({place.key for place in places}) == 3

    def test_it_is_all_there_after_reopening(self, store: Payloads, path: Path) -> None:
        places = self.write(store, 1, 2)
        store.close()
        store.close()
        store, missing = self.reopen(path, places)
        assert missing == set()
        self.expect(store, places[1], 2)
        self.expect(store, self.write(store, 3)[0], 3)
        self.expect(store, places[0], 1)
        store.close()

    def test_what_is_not_named_is_freed_and_what_is_not_there_is_told(
        self, store: Payloads, path: Path
    ) -> None:
        one, two, three = self.write(store, 1, 2, 3)
        store.close()
        unknown = Place(three.key + (1 << 30))
        store, missing = self.reopen(path, [one, three, unknown])
        assert missing == store.missing([one.key, three.key, unknown.key]) == {unknown.key}
        assert store.missing([two.key]) == {two.key}
        self.expect(store, three, 3)
        with pytest.raises(CorruptBlock):
            self.read(store, Place(two.key))
        store.close()

    @pytest.mark.parametrize("eighths", range(1, 9))
    def test_payloads_of_every_eighth_of_a_block_come_back(self, store: Payloads, eighths: int) -> None:
        nbytes = self.block_bytes * eighths // 8
        for place, seed in zip(self.write(store, 1, 2, nbytes=nbytes), (1, 2), strict=True):
            self.expect(store, place, seed, nbytes)
        assert nbytes <= store.stored_bytes(nbytes) < nbytes + 2 * PAGE_BYTES

    def test_sizes_may_be_mixed_in_a_batch(self, store: Payloads) -> None:
        sizes = [self.block_bytes * eighths // 8 for eighths in (8, 3, 3, 8, 1, 8, 5, 8, 8)]
        runs = [Run.of(store.lead, body(seed, nbytes)) for seed, nbytes in enumerate(sizes)]
        for seed, place in enumerate(store.write(runs)):
            self.expect(store, place, seed, sizes[seed])

    def test_a_missing_payload_is_corrupt_and_so_is_one_of_another_length(self, store: Payloads) -> None:
        (place,) = self.write(store, 1)
        with pytest.raises(CorruptBlock, match="missing"):
            self.read(store, Place(place.key + (1 << 40)))
        with pytest.raises(CorruptBlock, match=r"length|expected"):
            self.read(store, Place(place.key), self.block_bytes // 2)

    def test_a_read_leaves_the_pages_behind_its_own_alone(self, store: Payloads) -> None:
        (place,) = self.write(store, 1, nbytes=5000)
        for at in (place, Place(place.key)):
            run = Run.fresh(store.lead, 5000 + 4 * PAGE_BYTES)
            shorter = Run(run.memory, store.lead, 5000)
            store.read_into(at, shorter)
            assert shorter.payload == body(1, 5000)
            assert not any(run.memory[len(shorter.used) :])

    def test_writing_or_freeing_nothing_changes_nothing(self, store: Payloads) -> None:
        (place,) = self.write(store, 1)
        assert store.write([]) == []
        store.free([])
        store.free([place.key + (1 << 30), place.key + (1 << 40)])
        self.expect(store, place, 1)

    def test_freeing_twice_frees_once(self, store: Payloads) -> None:
        one, two = self.write(store, 1, 2)
        store.free([one.key])
        store.free([one.key, one.key])
        fresh = self.write(store, 3, 4)
        assert len({place.key for place in (two, *fresh)}) == 3
        self.expect(store, two, 2)
        self.expect(store, fresh[1], 4)

    def test_many_threads_read_beside_the_writer(self, store: Payloads) -> None:
        places = self.write(store, *range(16))
        with ThreadPoolExecutor(8) as pool:
            reads = [pool.submit(self.read, store, places[i % 16]) for i in range(400)]
            for _ in range(10):
                store.free([place.key for place in self.write(store, 99, 99, 99, 99)])
            for i, done in enumerate(reads):
                assert done.result() == body(i % 16, self.block_bytes)

    # --- room

    def test_several_threads_write_and_free_beside_each_other(self, store: Payloads) -> None:
        def turn(thread: int) -> list[tuple[Place, int]]:
            kept: list[tuple[Place, int]] = []
            for first in range(100 * thread, 100 * thread + 24, 3):
                seeds = range(first, first + 3)
                places = self.write(store, *seeds)
                kept.append((places[1], seeds[1]))
                store.free([places[0].key, places[2].key])
            return kept

        with ThreadPoolExecutor(4) as pool:
            kept = [each for turned in pool.map(turn, range(4)) for each in turned]
        assert len({place.key for place, _ in kept}) == len(kept)
        for place, seed in kept:
            self.expect(store, place, seed)

    def test_a_full_store_refuses_the_whole_batch_and_keeps_what_it_had(self, store: Payloads) -> None:
        places = self.fill(store)
        again = self.fill(store, batch=2)
        with pytest.raises(DiskError, match=r"full|MAP_FULL"):
            self.write(store, *range(8))
        self.expect(store, places[9], 1)
        self.expect(store, (places + again)[-1], 1 if again else 7)
        assert store.missing([place.key for place in places + again]) == set()
        used = (len(places) + len(again)) * store.stored_bytes(self.block_bytes)
        assert self.least_use * self.limit_bytes < used <= self.limit_bytes
        assert store.file_bytes() <= self.limit_bytes

    @pytest.mark.parametrize("batch", [8, 20])
    def test_after_it_was_full_freed_space_comes_back_every_time(self, store: Payloads, batch: int) -> None:
        first = len(places := self.fill(store, batch))
        for _ in range(3):
            store.free([place.key for place in places])
            places = self.fill(store, batch)
            assert len(places) > 0.85 * first
            assert store.file_bytes() <= self.limit_bytes

    @pytest.mark.parametrize("eighths", [8, 3])
    def test_at_the_brim_each_freed_payload_makes_room_for_the_next(
        self, store: Payloads, eighths: int
    ) -> None:
        nbytes = self.block_bytes * eighths // 8
        places = self.fill(store, batch=1, nbytes=nbytes)
        rng = random.Random(5)
        for turn in range(100):
            store.free([places.pop(rng.randrange(len(places))).key])
            (place,) = self.write(store, turn, nbytes=nbytes)
            self.expect(store, place, turn, nbytes)
            places.append(place)
        assert store.missing([place.key for place in places]) == set()

    # --- damage

    def test_files_that_cannot_be_opened_are_a_disk_error(self, tmp_path: Path) -> None:
        (tmp_path / "p").write_text("a file where the directory should be")
        with pytest.raises(DiskError, match="cannot be opened"):
            self.open(tmp_path / "p")

    @pytest.mark.parametrize("at", [0, 1, 4095, 50_000, 99_999])
    def test_a_flipped_byte_is_lost_and_the_others_are_whole(
        self, store: Payloads, path: Path, at: int
    ) -> None:
        places = self.write(store, *range(8))
        for file in self.data_files(path):
            start = file.read_bytes().find(body(3, self.block_bytes))
            if start >= 0:
                with open(file, "r+b") as damaged:
                    damaged.seek(start + at)
                    damaged.write(bytes([body(3, self.block_bytes)[at] ^ 0x10]))
        assert [self.lost(store, place, seed) for seed, place in enumerate(places)] == [
            seed == 3 for seed in range(8)
        ]
        self.heals(store, path)

    @pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.99])
    @pytest.mark.parametrize("running", [False, True], ids=["stopped", "running"])
    def test_truncated_files_lose_payloads_kill_nobody_and_heal(
        self, store: Payloads, path: Path, share: float, running: bool
    ) -> None:
        places = self.write(store, *range(20))
        missing: set[int] = set()
        if not running:
            store.close()
        for file in self.data_files(path):
            os.truncate(file, int(file.stat().st_blocks * 512 * share))
        if not running:
            store, missing = self.reopen(path, places)
        gone = {place.key for seed, place in enumerate(places) if self.lost(store, place, seed)}
        assert missing <= gone
        assert missing or running
        assert share > 0.5 or places[-1].key in gone
        self.heals(store, path)

    @pytest.mark.parametrize("running", [False, True], ids=["stopped", "running"])
    @pytest.mark.parametrize("what", ["files", "directory"])
    def test_deleted_files_are_missing_payloads_and_heal(
        self, store: Payloads, path: Path, what: str, running: bool
    ) -> None:
        places = self.write(store, 1, 2)
        keys = {place.key for place in places}
        if not running:
            store.close()
        if what == "files":
            for file in self.data_files(path):
                file.unlink()
        else:
            shutil.rmtree(path)
        if not running:
            store, missing = self.reopen(path, places)
            assert missing == keys
        assert store.missing(list(keys)) == keys
        assert all(self.lost(store, place, seed) for place, seed in zip(places, (1, 2), strict=True))
        self.heals(store, path)

    def test_files_replaced_by_older_ones_deliver_nothing_wrong_and_heal(
        self, store: Payloads, path: Path
    ) -> None:
        old = self.write(store, 1, 2)
        store.close()
        copy = path.with_name("copy")
        shutil.copytree(path, copy)
        store, _ = self.reopen(path, old)
        store.free([old[0].key])
        new = self.write(store, 3, 4)
        shutil.rmtree(path)
        copy.rename(path)
        for place, seed in zip(new, (3, 4), strict=True):
            assert self.lost(store, place, seed)
        store.close()
        store, missing = self.reopen(path, [old[1], *new])
        assert old[1].key not in missing
        self.expect(store, old[1], 2)
        assert all(self.lost(store, place, seed) for place, seed in zip(new, (3, 4), strict=True))
        self.heals(store, path)
