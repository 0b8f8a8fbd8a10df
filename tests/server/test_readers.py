"""Processes that load one document together through an arena smaller than it."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from kvstore.api import KVStore
from tests.server.conftest import ROOT_DIR, DaemonProcess, Fleet, document, start
from tests.server.test_failures import BIG

Flags = Callable[..., list[str]]
BLOCKS = 60  # 132 MB, through an arena of 64 MiB
HALT = "20"  # the block that a halting reader has when it stops

READER = textwrap.dedent(
    """
    import sys
    import kvstore
    from kvstore.api import Readers
    from tests.server.conftest import document
    from tests.server.test_failures import BIG

    url, blocks, group, halt = sys.argv[1:]
    client = kvstore.connect(url, timeout=30)
    doc = document(client, int(blocks), layout=BIG)
    print("ready", flush=True)
    sys.stdin.readline()
    seen = 0
    with client.load(doc.namespace, doc.hashes, readers=Readers(bytes.fromhex(group), 4)) as load:
        for batch in load:
            for block in batch:
                assert block.index == seen
                assert block.data == doc.data(doc.hashes[seen])
                seen += 1
                if seen == int(halt):
                    print("halted", flush=True)
                    sys.stdin.readline()
    print(seen, flush=True)
"""
)


class Reader:
    """One of four; with ``halt`` it stands still after so many blocks until it is told to go on."""

    def __init__(self, url: str, halt: str = "-1") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READER, url, str(BLOCKS), "ab" * 16, halt],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT_DIR,
        )

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def cold(fleet: Fleet, mode: str, flags: Flags) -> tuple[DaemonProcess, KVStore]:
    """A daemon that has the document on disk only."""
    daemon = start(fleet, "mapped", flags)
    writer = fleet.connect(daemon.url)
    document(writer, BLOCKS, layout=BIG).store(writer)
    assert daemon.term() == 0
    daemon.close()
    fresh = start(fleet, mode, flags)
    return fresh, fleet.connect(fresh.url)


def begin(readers: list[Reader]) -> None:
    assert [reader.says() for reader in readers] == ["ready"] * len(readers)
    for reader in readers:
        reader.go()


@pytest.mark.parametrize("mode", ["mapped", "tcp-bytes"])
def test_four_readers_read_the_disk_once(mode: str, fleet: Fleet, flags: Flags) -> None:
    daemon, client = cold(fleet, mode, flags)
    readers = [Reader(daemon.url) for _ in range(4)]
    begin(readers)
    assert [reader.says() for reader in readers] == [str(BLOCKS)] * 4
    assert client.status().counters["disk_read_blocks"] == BLOCKS
    for reader in readers:
        reader.close()


def test_a_reader_that_is_killed_holds_nobody_up(fleet: Fleet, flags: Flags) -> None:
    daemon, client = cold(fleet, "mapped", flags)
    victim, *readers = [Reader(daemon.url, halt) for halt in (HALT, "-1", "-1", "-1")]
    begin([victim, *readers])
    assert victim.says() == "halted"
    victim.close()
    assert [reader.says() for reader in readers] == [str(BLOCKS)] * 3
    for reader in readers:
        reader.close()
    daemon.wait_for("event=worker_gone", 4)
    assert client.status().leases == 0


def test_a_reader_that_is_stopped_is_left_behind_and_reads_again(fleet: Fleet, flags: Flags) -> None:
    daemon, client = cold(fleet, "mapped", flags)
    stopped, *readers = [Reader(daemon.url, halt) for halt in (HALT, "-1", "-1", "-1")]
    begin([stopped, *readers])
    assert stopped.says() == "halted"
    stopped.process.send_signal(signal.SIGSTOP)
    assert [reader.says() for reader in readers] == [str(BLOCKS)] * 3
    counters = client.status().counters
    assert counters["readers_left_behind"] == 1
    stopped.process.send_signal(signal.SIGCONT)
    stopped.go()
    assert stopped.says() == str(BLOCKS)
    assert client.status().counters["disk_read_blocks"] > counters["disk_read_blocks"] >= BLOCKS
    for reader in (stopped, *readers):
        reader.close()
