"""Memory on a NUMA node of choice, where the machine has several."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from kvstore.errors import ArenaUnavailable, InvalidArgument

_NODES = Path("/sys/devices/system/node")
_MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers; glibc has no function for it
_MPOL_BIND = 2
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def bind_to_node(address: int, nbytes: int, node: int) -> None:
    """Take the pages of ``[address, address + nbytes)`` that are first touched from now on from ``node``.

    The address must be a page's. For shared memory this holds for every process that maps it.
    Raises ``InvalidArgument`` for a node that the machine does not have, ``ArenaUnavailable``
    where binding is refused.
    """
    if node < 0 or not (_NODES / f"node{node}").is_dir():
        raise InvalidArgument(f"numa_node={node}: this machine has {', '.join(_names()) or 'no nodes'}")
    number = _MBIND.get(platform.machine())
    if number is None:
        raise ArenaUnavailable(
            f"numa_node={node}: binding is not known for {platform.machine()}; leave it out"
        )
    mask = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel takes one bit less than it is told.
    bits = ctypes.c_ulong(len(mask) * _WORD_BITS + 1)
    start, size = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
    if libc.syscall(ctypes.c_long(number), start, size, _MPOL_BIND, mask, bits, 0):
        reason = os.strerror(ctypes.get_errno())
        raise ArenaUnavailable(f"numa_node={node} was refused ({reason}); leave it out, or permit mbind")


def _names() -> list[str]:
    return sorted(path.name for path in _NODES.glob("node[0-9]*"))
