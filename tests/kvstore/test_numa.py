import mmap
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ArenaUnavailable, InvalidArgument
from kvstore.numa import bind_to_node


def policy_at(address: int) -> str:
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{address:x} ")]
    return line.split()[1]


@pytest.mark.skipif(
    not Path("/sys/devices/system/node/node0").is_dir(), reason="the kernel has no NUMA nodes"
)
def test_shared_memory_is_bound_to_a_node_that_exists():
    memory = mmap.mmap(-1, 1 << 20)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    try:
        bind_to_node(address, len(memory), 0)
    except ArenaUnavailable as refused:
        pytest.skip(str(refused))
    memory[:] = bytes(1 << 20)
    assert policy_at(address) == "bind:0"


@pytest.mark.parametrize("node", [-1, 4000])
def test_a_node_that_does_not_exist_is_refused_by_its_number(node):
    with pytest.raises(InvalidArgument, match=f"numa_node={node}"):
        bind_to_node(0, 4096, node)


@pytest.mark.skipif(
    not Path("/sys/devices/system/node/node0").is_dir(), reason="the kernel has no NUMA nodes"
)
def test_memory_that_cannot_be_bound_is_refused_with_the_reason():
    with pytest.raises(ArenaUnavailable, match="numa_node=0 was refused"):
        bind_to_node(1, 4096, 0)  # not at a page's start
