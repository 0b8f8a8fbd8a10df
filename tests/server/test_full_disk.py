"""Disks that are full, refuse or vanish under a daemon: it serves what it can, says so, and comes back."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.api import KVStore
from kvstore.checking import check
from kvstore.client import Client
from kvstore.settings import MIB
from tests.server.conftest import ROOT_DIR, DaemonProcess, Document, Fleet, document
from tests.server.test_failures import until

Flags = Callable[..., list[str]]
KINDS = ("lmdb", "slab")
SMALL_DISK = 12 * MIB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system of 12 MiB."""
    mounted: list[Path] = []

    def mount(options: str = "rw") -> Path:
        path = tmp_path / "disk"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK},{options}", "none", str(path)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small tmpfs is not permitted here")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def stored(client: Client, seed: int) -> tuple[Document, bool]:
    """A document of twelve blocks, and whether it is on disk."""
    doc = document(client, 12, seed=seed)
    return doc, client.durable(doc.store(client, durable=False))


def mode(client: KVStore) -> str:
    return client.status().mode


def is_whole(data: Path) -> None:
    report = check(data)
    assert (report.faults, report.cut_off) == ([], 0)


def comes_back(client: Client, before: list[Document]) -> None:
    """Writes again by itself, and has all that it had and what comes from now on."""
    until(lambda: mode(client) == "ok")
    fresh, durable = stored(client, 99)
    assert durable
    assert all(doc.load(client) == 12 for doc in (*before, fresh))


def is_host_only(client: Client, before: list[Document]) -> None:
    """Serves what it had and what it gets, says that it can't write, and promises nothing."""
    unsure, durable = stored(client, 50)
    assert not durable
    assert mode(client) == "host_only"
    assert client.status().counters["write_failures"] > 0
    assert all(doc.load(client) == 12 for doc in (*before, unsure))


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_fills_and_is_emptied_costs_nothing_but_its_room(
    kind: str, fleet: Fleet, flags: Flags, small_disk: Callable[..., Path]
) -> None:
    disk = small_disk()
    # It may use more than there is: others have filled the disk.
    daemon = fleet.daemon(*flags(data=disk / "data", payloads=kind, host_bytes="4MiB", disk_bytes="64MiB"))
    client = fleet.connect(daemon.url)
    before = [doc for doc, durable in (stored(client, seed) for seed in range(3)) if durable]
    assert len(before) == 3
    with open(disk / "ballast", "wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(4096))
        except OSError:
            pass  # full
    # A preallocated slab, and pages that LMDB has free, still take a few.
    full = next(seed for seed in range(10, 40) if not stored(client, seed)[1])
    assert full < 39
    is_host_only(client, before)
    (disk / "ballast").unlink()
    comes_back(client, before)
    assert daemon.term() == 0
    is_whole(disk / "data")


@pytest.mark.parametrize("kind", KINDS)
def test_a_daemon_whose_files_may_not_grow_serves_and_writes_again_when_they_may(
    kind: str, fleet: Fleet, flags: Flags
) -> None:
    daemon = fleet.daemon(*flags(payloads=kind, host_bytes="4MiB", disk_bytes="64MiB"))
    client = fleet.connect(daemon.url)
    before = [stored(client, seed)[0] for seed in range(3)]
    limit(daemon, 4096)
    is_host_only(client, before)
    limit(daemon, resource.RLIM_INFINITY)
    comes_back(client, before)
    assert daemon.term() == 0
    is_whole(daemon.socket.parent.parent / "data")


def limit(daemon: DaemonProcess, nbytes: int) -> None:
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_vanishes_leaves_a_daemon_that_serves_and_promises_nothing(
    kind: str, fleet: Fleet, flags: Flags
) -> None:
    daemon = fleet.daemon(*flags(payloads=kind, host_bytes="4MiB", disk_bytes="64MiB"))
    client = fleet.connect(daemon.url)
    before = [stored(client, seed)[0] for seed in range(3)]
    shutil.rmtree(daemon.socket.parent.parent / "data")
    is_host_only(client, before)
    daemon.restart()
    client = fleet.connect(daemon.url)
    doc, durable = stored(client, 1)
    assert durable
    assert doc.load(client) == 12
    assert mode(client) == "ok"


def test_a_read_only_disk_is_refused_with_one_line(flags: Flags, small_disk: Callable[..., Path]) -> None:
    data = small_disk("ro") / "data"
    command = [sys.executable, "-m", "server", "serve", *flags(data=data)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT_DIR, check=False)
    assert ended.returncode == 2
    assert "cannot be written" in ended.stderr.splitlines()[-1]
