"""What is said of the page cache is what the kernel says."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.page_cache import Dropped, cached_bytes, drop

MIB = 1 << 20


def sparse_file(path: Path) -> Path:
    """A file of a gigabyte with a mebibyte of data in the middle, written and in the page cache."""
    with path.open("wb") as file:
        file.truncate(1024 * MIB)
        file.seek(512 * MIB)
        file.write(os.urandom(MIB))
    return path


def test_a_file_just_written_is_cached_and_its_holes_do_not_count(tmp_path: Path) -> None:
    assert cached_bytes(sparse_file(tmp_path / "file")) == MIB


def test_looking_at_a_file_does_not_cache_it_and_dropping_is_verified(tmp_path: Path) -> None:
    path = sparse_file(tmp_path / "file")
    dropped = drop(tmp_path)
    assert (dropped.stored_bytes, dropped.cached_before, dropped.fadvise) == (MIB, MIB, True)
    assert dropped.cached_after == cached_bytes(path) == cached_bytes(path)
    assert dropped.cold == (dropped.cached_after < MIB // 100)


def test_what_was_left_is_said() -> None:
    left = Dropped(fadvise=True, drop_caches=False, stored_bytes=200, cached_before=200, cached_after=100)
    assert not left.cold
    assert str(left) == "page cache dropped by fadvise, 50.0% of the files left in it"
    nothing = Dropped(fadvise=False, drop_caches=False, stored_bytes=0, cached_before=0, cached_after=0)
    assert "dropped by nothing" in str(nothing)
