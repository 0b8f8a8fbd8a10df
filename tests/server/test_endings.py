"""What closing costs beside a daemon that does not answer, and what a client keeps of one that refuses."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest

from kvstore.api import MissReason
from kvstore.client import Client
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.hashing import ROOT, block_hashes
from kvstore.testing.chains import eventually
from server import workers
from tests.server.conftest import ROOT_DIR, Document, Fleet, document, start

Flags = Callable[..., list[str]]


def counters(client: Client) -> dict[str, int]:
    """The client's own, which a silent daemon cannot tell."""
    return client._transport.breaker.counters()


def leases(client: Client, doc: Document, count: int) -> list[int]:
    """So many, of a block each."""
    chains = [block_hashes(doc.namespace, [7, index, *range(64)]) for index in range(count)]
    return [client.reserve(doc.namespace, ROOT, chain).lease for chain in chains]


@pytest.mark.parametrize("mode", ["mapped", "tcp-bytes"])
def test_closing_beside_a_silent_daemon_asks_it_once(
    mode: str, fleet: Fleet, flags: Flags, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start(fleet, mode, flags)
    client = fleet.connect(daemon.url, timeout=1.0)
    doc = document(client, 12)
    doc.store(client)
    leases(client, doc, 8)
    loads = [iter(client.load(doc.namespace, doc.hashes)) for _ in range(4)]
    for load in loads:
        assert next(load)
    asked: list[object] = []
    release = client._transport.stub.Release

    def counted(*args: object, **options: object) -> object:
        asked.append(args)
        return release(*args, **options)

    monkeypatch.setattr(client._transport.stub, "Release", counted)
    daemon.process.send_signal(signal.SIGSTOP)
    client.close()
    assert len(asked) == 1
    assert [list(load) for load in loads] == [[]] * 4
    daemon.process.send_signal(signal.SIGCONT)
    other = fleet.connect(daemon.url)
    if mode == "mapped":
        daemon.wait_for("event=worker_gone")
        eventually(lambda: other.status().leases == 0)


@pytest.mark.parametrize("call", ["release", "durable", "load"])
def test_a_call_with_a_timeout_of_its_own_opens_the_circuit_of_a_silent_daemon(
    call: str, fleet: Fleet, flags: Flags
) -> None:
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url, timeout=20.0)  # a call that is tried would wait so long
    doc = document(client, 40)
    ticket = doc.store(client)
    (lease,) = leases(client, doc, 1)
    with client.load(doc.namespace, doc.hashes, timeout=0.2) as load:
        daemon.process.send_signal(signal.SIGSTOP)
        if call == "release":
            client.release(lease)
        elif call == "durable":
            with pytest.raises(DeadlineExceeded):
                client.durable(ticket, timeout=0.2)
        else:
            assert sum(len(batch) for batch in load) <= 40
            with suppress(DeadlineExceeded):
                load._source._call.receive(0.1)  # all of it may have come before the daemon stopped
        for _ in range(20):
            assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).reason is MissReason.UNAVAILABLE
        assert counters(client)["circuit_opened"] == 1
        assert counters(client)["circuit_refused"] >= 20
    daemon.process.send_signal(signal.SIGCONT)
    eventually(lambda: client.match(doc.namespace, doc.hashes, len(doc.tokens)).blocks == 40)


def test_a_daemon_that_refuses_a_lease_is_not_left(
    fleet: Fleet, flags: Flags, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 1)
    doc.store(client)
    held = [client.reserve(doc.namespace, ROOT, []).lease for _ in range(workers.MAX_LEASES)]
    mapping = client._attachment._mapping
    assert mapping is not None
    for _ in range(3):
        with pytest.raises(Unavailable, match="release some"):
            client.reserve(doc.namespace, ROOT, doc.hashes)
        assert doc.load(client) == 0
    assert client._attachment._mapping is mapping
    assert sum("event=worker_mapped" in line for line in daemon.log) == 1
    for lease in held[:2]:
        client.release(lease)
    assert doc.load(client) == 1


INHERITING = """
import os, subprocess, sys, kvstore
from kvstore.namespace import Namespace
from kvstore.layout import LatentLayout
def files(pid):
    names = (os.path.realpath(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
    ours = (name for name in names if "memfd" in name or "socket:" in name or sys.argv[2] in name)
    return {name for name in ours if not name.endswith("data.mdb")}  # LMDB's own, and no lock
store = kvstore.open(sys.argv[2], host_bytes=1 << 20, disk_bytes=16 << 20)
client = kvstore.connect(sys.argv[1])
client.load(client.open_namespace(Namespace(LatentLayout(2, 32, 16))), [])
child = subprocess.Popen(["sleep", "60"], close_fds=False)
ours, theirs = files(os.getpid()), files(child.pid)
child.kill()
print(len(ours) > 3, sorted(theirs), flush=True)
os._exit(0)
"""


def test_a_program_that_is_started_inherits_nothing(fleet: Fleet, flags: Flags, tmp_path: object) -> None:
    daemon = start(fleet, "mapped", flags)
    command = [sys.executable, "-c", INHERITING, daemon.url, f"{tmp_path}/data"]
    done = subprocess.run(command, cwd=ROOT_DIR, capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n", done.stderr


def test_a_daemon_counts_no_worker_for_a_client_that_was_dropped(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    watcher = fleet.connect(daemon.url)
    client = fleet.connect(daemon.url)
    fleet.clients.remove(client)
    doc = document(client, 4)
    doc.store(client)
    leases(client, doc, 3)
    kept = [iter(client.load(doc.namespace, doc.hashes))]
    assert next(kept[0])
    assert watcher.status().leases == 4
    kept.clear()
    del client
    eventually(lambda: watcher.status().leases == 0)
    daemon.wait_for("event=worker_gone")
