"""How much memory there is to be had: the least that the machine and each limit over this process leave.

The kernel refuses no page of a memory that is too large, but kills a process half-way; so limits are
read beforehand. Functions take the root of the file system, below which everything is looked for.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KIB = 1024
_NO_LIMIT = 1 << 62  # version 1 of cgroups writes a number near the largest one
_STRICT_OVERCOMMIT = 2
_BACK = ("Active(file)", "Inactive(file)", "SReclaimable")  # the kernel gives it back when asked for memory


@dataclass(frozen=True, slots=True)
class Bound:
    """One limit, and how much of it is in use and cannot be had back. Bytes."""

    name: str  # and where it is set
    limit: int
    used: int
    mend: str

    @property
    def left(self) -> int:
        """What is still to be had."""
        return max(self.limit - self.used, 0)

    def __str__(self) -> str:
        return f"{self.name} is {self.limit}, of which {self.used} are in use"


def tightest(root: Path = Path("/"), numa_node: int | None = None) -> Bound:
    """The limit that leaves least for shared memory of this process."""
    bounds = [*_machine(root), *_nodes(root, numa_node), *_cgroups(root), *_resources(root)]
    return min(bounds, key=lambda bound: bound.left)


def _machine(root: Path) -> Iterator[Bound]:
    known = _table(root / "proc/meminfo")
    total, available = known["MemTotal"], known["MemAvailable"]
    yield Bound("the machine's memory", total, total - available, "end what uses it")
    strict = _number(root / "proc/sys/vm/overcommit_memory") == _STRICT_OVERCOMMIT
    if strict and "CommitLimit" in known:
        yield Bound(
            "what the machine promises (vm.overcommit_memory=2)",
            known["CommitLimit"],
            known["Committed_AS"],
            "raise vm.overcommit_ratio",
        )


def _nodes(root: Path, numa_node: int | None) -> Iterator[Bound]:
    """Memory of the NUMA nodes that we may take it from, where these are not all."""
    nodes = root / "sys/devices/system/node"
    known = _numbers(_text(nodes / "has_memory"))
    allowed = _numbers(_text(root / "proc/self/status").partition("Mems_allowed_list:")[2].split("\n")[0])
    taken = known & (allowed if numa_node is None else {numa_node})
    if not taken or taken == known:
        return
    tables = [_table(nodes / f"node{node}" / "meminfo", skip=2) for node in taken]
    total, free = (sum(table.get(name, 0) for table in tables) for name in ("MemTotal", "MemFree"))
    back = sum(table.get(name, 0) for table in tables for name in _BACK)
    which = ", ".join(map(str, sorted(taken)))
    used = max(total - free - back, 0)
    yield Bound(f"memory of the NUMA nodes {which}", total, used, "take it from other nodes")


def _cgroups(root: Path) -> Iterator[Bound]:
    """The limits of each control group that we are in, up to the root of what can be seen of them."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for group in _groups(root, "cgroup2", "", path):
                yield from _unified(group)
        elif "memory" in controllers.split(","):
            groups = list(_groups(root, "cgroup", "memory", path))
            for group in groups:
                yield from _version_1(group)
                if _number(group.parent / "memory.use_hierarchy") == 0:
                    break  # the limits of those above do not count for us


def _groups(root: Path, kind: str, controller: str, path: str) -> Iterator[Path]:
    """Directories of a group and those above it, in each place where such groups are mounted."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        front, _, back = line.partition(" - ")
        mounted, place = front.split(" ")[3:5]
        found, _, options = back.split(" ", 2)
        if found != kind or (controller and controller not in options.split(" ")[-1].split(",")):
            continue
        top = root / _plain(place).lstrip("/")
        inside = path.removeprefix(_plain(mounted)) if _plain(mounted) != "/" else path
        # What lies outside of what is mounted (a container's view) is named by dots: its top is ours.
        parts = [part for part in inside.split("/") if part]
        group = top if ".." in parts else top.joinpath(*parts)
        while not group.is_dir() and group != top:
            group = group.parent
        while True:
            yield group
            if group == top:
                return
            group = group.parent


def _unified(group: Path) -> Iterator[Bound]:
    stat = _table(group / "memory.stat", unit=1)
    back = sum(stat.get(name, 0) for name in ("inactive_file", "active_file", "slab_reclaimable"))
    used = max((_number(group / "memory.current") or 0) - back, 0)
    for name in ("memory.max", "memory.high"):
        limit = _number(group / name)
        if limit is not None:
            yield Bound(f"{name} of {group}", limit, used, "raise it (MemoryMax, MemoryHigh, --memory)")


def _version_1(group: Path) -> Iterator[Bound]:
    stat = _table(group / "memory.stat", unit=1)
    back = sum(stat.get(name, 0) for name in ("total_inactive_file", "total_active_file"))
    used = max((_number(group / "memory.usage_in_bytes") or 0) - back, 0)
    limit = _number(group / "memory.limit_in_bytes")
    if limit is not None and limit < _NO_LIMIT:
        yield Bound(f"memory.limit_in_bytes of {group}", limit, used, "raise it (MemoryLimit, --memory)")
    above = stat.get("hierarchical_memory_limit", _NO_LIMIT)
    if above < min(limit or _NO_LIMIT, _NO_LIMIT):  # of a group that we cannot see
        yield Bound(f"hierarchical_memory_limit of {group}", above, used, "raise it where it is set")


def _resources(root: Path) -> Iterator[Bound]:
    """What ``ulimit`` allows: address space, and the size of a file, which shared memory is."""
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        used = _table(root / "proc/self/status").get("VmSize", 0)
        yield Bound("the address space (RLIMIT_AS)", space, used, "raise it (ulimit -v, LimitAS)")
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY:
        yield Bound("the size of a file (RLIMIT_FSIZE)", size, 0, "raise it (ulimit -f, LimitFSIZE)")


def _text(path: Path) -> str:
    """A file's text; empty where there is none to be read."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _number(path: Path) -> int | None:
    """The number in a file; None for ``max``, and where there is none."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _table(path: Path, skip: int = 0, unit: int = KIB) -> dict[str, int]:
    """Lines of a name and a number, in bytes; ``skip`` words stand before each name."""
    found: dict[str, int] = {}
    for line in _text(path).splitlines():
        words = line.split()[skip:]
        if len(words) > 1 and words[1].isdecimal():
            found[words[0].rstrip(":")] = int(words[1]) * unit
    return found


def _numbers(text: str) -> set[int]:
    """``0-2,5`` as a set."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _plain(path: str) -> str:
    """A path of mountinfo, which has spaces and the like as ``\\040``."""
    return path.encode().decode("unicode_escape").encode("latin-1").decode(errors="surrogateescape")
