"""The arena's memory: all there before it is used, sealed, in huge pages where they are granted."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import ArenaUnavailable, InvalidArgument
from kvstore.memory import allocate_shared, fault_in, map_shared

MIB = 1 << 20
SIZE = 130 * MIB + mmap.PAGESIZE  # more than two steps, and no whole number of huge pages


@pytest.fixture
def shared() -> Iterator[tuple[int, mmap.mmap]]:
    fd, mapped = allocate_shared(SIZE)
    yield fd, mapped
    mapped.close()
    os.close(fd)


def address(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def smaps(mapped: mmap.mmap) -> dict[str, int]:
    """What the kernel says of the mapping, in KiB."""
    start = f"{address(mapped):x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(start))
    found: dict[str, int] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if not value.endswith(" kB"):
            break
        found[name] = int(value.split()[0])
    return found


def test_every_page_has_its_memory_and_is_mapped_before_anybody_uses_it(
    shared: tuple[int, mmap.mmap],
) -> None:
    fd, mapped = shared
    assert os.fstat(fd).st_blocks * 512 >= SIZE
    assert smaps(mapped)["Rss"] * 1024 == SIZE


def test_the_memory_can_neither_shrink_nor_grow(shared: tuple[int, mmap.mmap]) -> None:
    for size in (SIZE - mmap.PAGESIZE, SIZE + mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(shared[0], size)


def test_new_memory_is_zero(shared: tuple[int, mmap.mmap]) -> None:
    assert not any(shared[1][at] for at in range(0, SIZE, 4096))


ALIGNED = """
import ctypes
from kvstore.memory import allocate_shared, map_shared

size = 130 * 2**20 + 4096
fd, first = allocate_shared(size)
for mapped in (first, map_shared(fd, size)):
    print(ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % 2**21)
"""


def test_mappings_lie_where_huge_pages_fit() -> None:
    # In a process of its own, as a daemon has: in one full of odd mappings no such place may be found.
    done = subprocess.run([sys.executable, "-c", ALIGNED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0"]


def test_memory_is_in_huge_pages_where_the_system_grants_them(shared: tuple[int, mmap.mmap]) -> None:
    huge = smaps(shared[1]).get("ShmemPmdMapped", 0)
    if not huge:
        pytest.skip("this system grants no huge pages in shared memory")
    assert huge % 2048 == 0


def test_faulting_in_maps_everything_and_changes_no_byte(shared: tuple[int, mmap.mmap]) -> None:
    shared[1][SIZE - 1] = shared[1][MIB] = 7
    with map_shared(shared[0], SIZE) as mapped:
        before = smaps(mapped)["Rss"]
        for _ in fault_in(mapped):
            pass
        assert before * 1024 < SIZE == smaps(mapped)["Rss"] * 1024
        assert mapped[SIZE - 1] == mapped[MIB] == 7


def test_faulting_in_can_be_ended_between_steps(shared: tuple[int, mmap.mmap]) -> None:
    with map_shared(shared[0], SIZE) as mapped:
        next(fault_in(mapped))
        assert 0 < smaps(mapped)["Rss"] * 1024 < SIZE


def test_more_memory_than_there_is_is_refused_with_the_figures() -> None:
    with pytest.raises(ArenaUnavailable, match=r"arena of 1152921504606846976 bytes: only \d+ bytes"):
        allocate_shared(1 << 60)


def test_memory_can_be_taken_from_a_node() -> None:
    try:
        fd, mapped = allocate_shared(4 * MIB, numa_node=0)
    except ArenaUnavailable as refused:
        pytest.skip(f"no memory can be bound here: {refused}")
    with mapped:
        placed = next(
            line
            for line in Path("/proc/self/numa_maps").read_text().splitlines()
            if line.startswith(f"{address(mapped):x} ")
        )
        assert " bind:0 " in placed
    os.close(fd)


def test_a_node_that_is_not_there_is_refused_and_keeps_no_memory() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidArgument, match="numa_node=4095"):
        allocate_shared(4 * MIB, numa_node=4095)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_shorter_than_its_mapping_is_refused(shared: tuple[int, mmap.mmap]) -> None:
    with pytest.raises(ValueError, match="greater than file size"):
        map_shared(shared[0], SIZE + mmap.PAGESIZE)
