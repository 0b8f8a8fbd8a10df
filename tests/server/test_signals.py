"""What signals do to a daemon, at any time of its life; no block is lost by one that is not SIGKILL."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import Unavailable
from kvstore.identity import Identity
from server.credentials import hash_of, new_token
from tests.server.conftest import DEADLINE, ROOT_DIR, Fleet, document, start
from tests.server.test_tls import Authority

Flags = Callable[..., list[str]]
BLOCKS = 200


def test_sighup_without_anything_to_read_again_is_a_line_and_loses_nothing(
    fleet: Fleet, flags: Flags
) -> None:
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    doc = document(client, BLOCKS)
    doc.store(client, durable=False)
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for("event=nothing_to_read_again")
    assert doc.load(client) == BLOCKS
    assert daemon.term() == 0
    daemon.start()
    match = client.match(doc.namespace, doc.hashes, len(doc.tokens))
    assert match.disk_blocks == BLOCKS


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE])
def test_signals_of_no_meaning_kill_nothing(number: signal.Signals, fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    daemon.process.send_signal(number)
    if number is not signal.SIGPIPE:
        daemon.wait_for(f"event=signal_ignored signal={number.name}")
    doc = document(client, 2)
    doc.store(client)
    assert daemon.term() == 0


def test_further_signals_during_the_drain_cut_nothing_short(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 60)
    doc.store(client, durable=False)
    with client.load(doc.namespace, doc.hashes) as load:  # a stream that keeps the drain waiting
        next(iter(load))
        daemon.process.send_signal(signal.SIGINT)
        daemon.wait_for("event=draining")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            daemon.process.send_signal(number)
        assert daemon.process.wait(DEADLINE) == 0
    daemon.wait_for("event=stopping_already signal=SIGINT")
    daemon.start()
    assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).disk_blocks == 60


def hangups(pid: int, kind: str) -> bool:
    """Whether a process ignores (SigIgn) or catches (SigCgt) SIGHUP."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in lines if line.startswith(kind))
    return bool(int(mask, 16) & 1 << (signal.SIGHUP - 1))


@pytest.mark.parametrize("module", ["server", "latentkv"])
def test_sighup_from_the_first_moment_on_does_not_stop_it(module: str, tmp_path: Path) -> None:
    flags = ["--data", str(tmp_path / "data"), "--listen", f"unix://{tmp_path}/kv.sock"]
    sizes = ["--host-bytes", "16MiB", "--disk-bytes", "32MiB", "--log-level", "error"]
    with subprocess.Popen(
        [sys.executable, "-m", module, "serve", *flags, *sizes],
        cwd=ROOT_DIR,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            ready = threading.Event()
            while not hangups(process.pid, "SigIgn"):  # what we do first; most of the start comes behind it
                assert process.poll() is None
                assert not hangups(process.pid, "SigCgt")

            def hang_up() -> None:
                while not ready.wait(0.01):
                    process.send_signal(signal.SIGHUP)

            hanging = threading.Thread(target=hang_up)
            hanging.start()
            line = process.stdout.readline()
            ready.set()
            hanging.join()
            assert line.startswith("latentkv: serving on ")
            process.terminate()
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()


def test_a_terminal_that_hangs_up_leaves_the_daemon_and_its_blocks(fleet: Fleet, flags: Flags) -> None:
    given = flags()
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "server", "serve", *given],
        cwd=ROOT_DIR,
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
    )
    try:
        os.close(its)
        seen = b""
        while b"latentkv: serving on" not in seen:
            seen += os.read(ours, 1 << 16)
        os.close(ours)  # now each line that it logs is an error
        process.send_signal(signal.SIGHUP)
        client = fleet.connect(given[given.index("--listen") + 1])
        doc = document(client, BLOCKS)
        doc.store(client, durable=False)
        client.close()
        process.terminate()
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
    daemon = fleet.daemon(*given)
    assert f"{BLOCKS} blocks" in daemon.ready


def test_sighup_takes_a_new_certificate_and_keeps_the_old_one_where_that_is_none(
    fleet: Fleet, flags: Flags, tmp_path: Path
) -> None:
    old, new = (Authority.of(tmp_path / name) for name in ("old", "new"))
    cert, key = old.issue("localhost")
    settings = {"tls_cert": cert, "tls_key": key, "credentials": tmp_path / "credentials.toml"}
    token = new_token()
    settings["credentials"].write_text(
        f'[[credential]]\nname = "us"\ntoken_sha256 = "{hash_of(token)}"\ntenants = ["*"]\n'
    )
    settings["credentials"].chmod(0o600)
    daemon = fleet.daemon(*flags("tls://localhost:0", **settings))

    def served(authority: Authority) -> bool:
        client = kvstore.connect(daemon.url, timeout=2.0, identity=Identity(token=token, ca=authority.ca))
        fleet.clients.append(client)
        try:
            client.status()
        except Unavailable:
            return False
        return True

    assert served(old)
    taken_cert, taken_key = new.issue("localhost")
    cert.write_bytes(taken_cert.read_bytes())
    daemon.process.send_signal(signal.SIGHUP)  # a certificate without its key
    daemon.wait_for("event=certificate_refused")
    assert served(old)
    key.write_bytes(taken_key.read_bytes())
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for("event=certificate_read")
    assert served(new)
    assert not served(old)
