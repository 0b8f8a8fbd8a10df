"""An arena that some limit over the process does not leave room for is refused, whoever set that limit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import ArenaUnavailable
from kvstore.memory import require_available
from kvstore.memory_limits import tightest
from tests.server.conftest import DEADLINE, ROOT_DIR

MIB, GIB = 1 << 20, 1 << 30
V2 = "25 1 0:20 {root} {at} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "26 1 0:21 {root} {at} rw shared:9 - cgroup cgroup rw,memory\n"


class Machine:
    """A machine's files under a directory, as the kernel would show them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\n")
        self.mounts = ""

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def mount(self, line: str, at: str, root: str = "/") -> None:
        self.mounts += line.format(root=root, at=at)
        self.write("proc/self/mountinfo", self.mounts)
        (self.root / at.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def group(self, path: str, **files: object) -> None:
        (self.root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            self.write(f"{path.lstrip('/')}/memory.{name}", value)

    def left(self, numa_node: int | None = None) -> int:
        return tightest(self.root, numa_node).left


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


UNIT = "/sys/fs/cgroup/system.slice/latentkv.service"


@pytest.fixture
def unit(machine: Machine) -> Machine:
    """In a systemd unit of cgroup version 2, with no limit anywhere."""
    machine.write("proc/self/cgroup", "0::/system.slice/latentkv.service")
    machine.mount(V2, "/sys/fs/cgroup")
    machine.group(UNIT, max="max", high="max", current=3 * GIB, stat="anon 1\ninactive_file 0")
    machine.group("/sys/fs/cgroup/system.slice", max="max", high="max", current=6 * GIB)
    return machine


def test_without_limits_it_is_what_the_machine_has_left(unit: Machine) -> None:
    assert unit.left() == 48 * GIB


def test_without_control_groups_it_is_what_the_machine_has_left(machine: Machine) -> None:
    assert machine.left() == 48 * GIB


@pytest.mark.parametrize("name", ["max", "high"])
def test_a_units_limit_counts_less_what_is_in_use(name: str, unit: Machine) -> None:
    unit.group(UNIT, **{name: 8 * GIB})
    assert unit.left() == 5 * GIB
    assert f"memory.{name} of " in str(tightest(unit.root))


def test_page_cache_of_the_group_is_not_in_use(unit: Machine) -> None:
    stat = f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\nslab_reclaimable {GIB // 2}"
    unit.group(UNIT, max=8 * GIB, stat=stat)
    assert unit.left() == 8 * GIB - GIB // 2


def test_the_limit_of_a_group_above_counts(unit: Machine) -> None:
    unit.group(UNIT, max=32 * GIB)
    unit.group("/sys/fs/cgroup/system.slice", max=10 * GIB)
    assert unit.left() == 4 * GIB


def test_a_group_that_is_full_leaves_nothing(unit: Machine) -> None:
    unit.group(UNIT, max=2 * GIB)
    assert unit.left() == 0


def test_a_container_sees_its_own_group_as_the_root(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/")
    machine.mount(V2, "/sys/fs/cgroup")
    machine.group("/sys/fs/cgroup", max=GIB, current=0)
    assert machine.left() == GIB


@pytest.mark.parametrize("inside", ["/docker/1234", "/docker/1234/inner"])
def test_a_container_that_sees_its_group_by_the_hosts_name_finds_it(inside: str, machine: Machine) -> None:
    machine.write("proc/self/cgroup", f"0::{inside}")
    machine.mount(V2, "/sys/fs/cgroup", root="/docker/1234")
    machine.group("/sys/fs/cgroup", max=GIB, current=0)
    assert machine.left() == GIB


def test_a_group_outside_of_what_is_mounted_leaves_the_top_of_that(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/../other")
    machine.mount(V2, "/sys/fs/cgroup")
    machine.group("/sys/fs/cgroup", max=GIB, current=0)
    assert machine.left() == GIB


@pytest.fixture
def older(machine: Machine) -> Machine:
    """In a group of cgroup version 1, beside an empty hierarchy of version 2."""
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/\n4:hugetlb,memory:/jobs/7\n0::/")
    machine.mount(V2, "/sys/fs/cgroup/unified")
    machine.mount(V1, "/sys/fs/cgroup/memory")
    for path in ("", "/jobs", "/jobs/7"):
        machine.group(
            f"/sys/fs/cgroup/memory{path}",
            limit_in_bytes=9223372036854771712,
            usage_in_bytes=GIB,
            use_hierarchy=1,
            stat=f"cache 1\ntotal_inactive_file {GIB // 4}\ntotal_active_file 0",
        )
    return machine


def test_version_1_without_limits(older: Machine) -> None:
    assert older.left() == 48 * GIB


@pytest.mark.parametrize("path", ["/jobs/7", "/jobs", ""])
def test_a_limit_of_version_1_counts_at_each_height(path: str, older: Machine) -> None:
    older.group(f"/sys/fs/cgroup/memory{path}", limit_in_bytes=4 * GIB)
    assert older.left() == 4 * GIB - (GIB - GIB // 4)


def test_a_limit_above_does_not_count_where_groups_do_not_inherit(older: Machine) -> None:
    older.group("/sys/fs/cgroup/memory/jobs", limit_in_bytes=4 * GIB, use_hierarchy=0)
    assert older.left() == 48 * GIB


def test_a_limit_of_version_1_from_above_what_is_mounted_counts(older: Machine) -> None:
    stat = f"hierarchical_memory_limit {2 * GIB}"
    older.group("/sys/fs/cgroup/memory/jobs/7", stat=stat)
    assert older.left() == GIB


def test_both_versions_count(older: Machine) -> None:
    older.group("/sys/fs/cgroup/memory/jobs", limit_in_bytes=4 * GIB)
    older.group("/sys/fs/cgroup/unified", max=3 * GIB, current=0)
    assert older.left() == 3 * GIB


def test_a_mount_with_odd_letters_is_found(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a b")
    machine.mount(V2, "/odd\\040place")
    machine.group("/odd place/a b", max=GIB, current=0)
    assert machine.left() == GIB


@pytest.mark.parametrize("junk", ["", "what?", "0::", "max", "-1"])
def test_files_that_say_nothing_are_no_limits(junk: str, unit: Machine) -> None:
    unit.group(UNIT, max=junk, current=junk, stat=junk)
    unit.write("proc/self/mountinfo", unit.mounts)
    assert unit.left() == 48 * GIB


def test_what_the_machine_promises_counts_where_it_promises_no_more_than_it_has(machine: Machine) -> None:
    text = (machine.root / "proc/meminfo").read_text()
    machine.write("proc/meminfo", f"{text}CommitLimit: {20 << 20} kB\nCommitted_AS: {15 << 20} kB\n")
    machine.write("proc/sys/vm/overcommit_memory", 0)
    assert machine.left() == 48 * GIB
    machine.write("proc/sys/vm/overcommit_memory", 2)
    assert machine.left() == 5 * GIB


def test_the_nodes_that_memory_may_come_from_count(machine: Machine) -> None:
    machine.write("sys/devices/system/node/has_memory", "0-1")
    for node, free in ((0, 4 << 20), (1, 30 << 20)):
        lines = (f"MemTotal: {32 << 20} kB", f"MemFree: {free} kB", f"Inactive(file): {1 << 20} kB")
        table = "".join(f"Node {node} {line}\n" for line in lines)
        machine.write(f"sys/devices/system/node/node{node}/meminfo", table)
    machine.write("proc/self/status", "Name: x\nMems_allowed_list:\t0-1\n")
    assert machine.left() == 48 * GIB
    assert machine.left(numa_node=0) == 5 * GIB
    machine.write("proc/self/status", "Name: x\nMems_allowed_list:\t1\n")
    assert machine.left() == 31 * GIB


def test_the_refusal_has_both_numbers_the_limit_and_what_to_do(unit: Machine) -> None:
    unit.group(UNIT, max=4 * GIB)
    require_available(900 * MIB, root=unit.root)
    with pytest.raises(ArenaUnavailable) as refused:
        require_available(GIB, root=unit.root)
    said = str(refused.value)
    assert f"host arena of {GIB} bytes: only " in said
    assert f"latentkv.service is {4 * GIB}, of which {3 * GIB} are in use" in said
    assert "lower host_bytes, or raise it (MemoryMax" in said


LIMITED = """
import resource, sys
from kvstore.memory import require_available
resource.setrlimit(resource.{name}, (2 << 30, 2 << 30))
try:
    require_available(2 << 30)
except Exception as error:
    print(type(error).__name__, error)
require_available(64 << 20)
"""


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_limits_of_the_process_count(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED.format(name=name)], cwd=ROOT_DIR, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("ArenaUnavailable host arena of 2147483648 bytes: only ")
    assert f"({name}) is 2147483648" in ran.stdout


@contextlib.contextmanager
def real_group(limit: int) -> Iterator[Path]:
    """A control group of version 1 or 2 with a limit, inside of our own; skips where none can be made."""
    of = {
        line.split(":")[1]: line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()
    }
    version_1 = Path("/sys/fs/cgroup/memory")
    base, name = (version_1 / of.get("memory", "/").lstrip("/"), "memory.limit_in_bytes")
    if not version_1.is_dir():
        base, name = Path("/sys/fs/cgroup") / of.get("", "/").lstrip("/"), "memory.max"
    try:
        group = Path(tempfile.mkdtemp(prefix="latentkv-", dir=base))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / name).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        yield group
    finally:
        group.rmdir()


def enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def test_a_daemon_in_a_real_group_is_refused_what_the_group_has_not() -> None:
    with real_group(512 * MIB) as group, tempfile.TemporaryDirectory() as data:
        flags = ["--data", data, "--listen", f"unix://{data}/kv.sock", "--log-level", "error"]
        ran = subprocess.run(
            [sys.executable, "-m", "server", "serve", *flags, "--host-bytes", "2GiB"],
            cwd=ROOT_DIR,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            preexec_fn=lambda: enter(group),
        )
    assert ran.returncode == 2, ran
    assert f"host arena of {2 * GIB} bytes: only " in ran.stderr
    assert f"is {512 * MIB}, of which " in ran.stderr
    assert ran.stderr.count("\n") == 1
