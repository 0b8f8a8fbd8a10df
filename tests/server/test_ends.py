"""The end of a daemon: each step of it is taken, whatever those before raised, and only what is ours goes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

import kvstore
from kvstore.directory import lock_directory
from kvstore.errors import DiskError
from kvstore.observer import Observer
from kvstore.settings import StoreSettings
from kvstore.store import Store
from kvstore.testing.faults import Faults
from server.commands.failures import one_line
from server.commands.serve import run_daemon
from server.config import load
from server.lifecycle import Daemon
from tests.server.conftest import DEADLINE, ROOT_DIR, Fleet, document, start
from tests.server.test_failures import until

Flags = Callable[..., list[str]]


def settings(flags: list[str]) -> dict[str, str]:
    return {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in zip(flags[::2], flags[1::2], strict=True)
    }


async def broken(settings: StoreSettings, observer: Observer) -> Store:
    """A store whose disk fails when it is closed."""
    return await Store.open(settings, Faults(fail_close=True).open, observer)


async def run_to_its_end(daemon: Daemon, socket: Path) -> None:
    running = asyncio.create_task(daemon.run())
    while not socket.exists():
        assert not running.done()
        await asyncio.sleep(0.01)
    url = f"unix://{socket}"
    await asyncio.to_thread(store_a_block, url)
    os.kill(os.getpid(), signal.SIGTERM)
    await running


def store_a_block(url: str) -> None:
    with contextlib.closing(kvstore.connect(url, timeout=DEADLINE)) as client:
        document(client, 1).store(client, durable=False)


@pytest.fixture
def handlers():
    """This process gets its own handlers of signals back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_store_that_fails_to_close_leaves_no_socket_and_no_port_and_is_told(
    flags: Flags, handlers: None, caplog: pytest.LogCaptureFixture
) -> None:
    config = load(settings(flags(http="127.0.0.1:0")))
    socket = Path(config.address.removeprefix("unix://"))
    daemon = Daemon(config, broken)
    with pytest.raises(DiskError, match="injected"):
        asyncio.run(run_to_its_end(daemon, socket))
    assert list(socket.parent.iterdir()) == []
    assert "event=store_close_failed domain=default" in caplog.text
    assert str(socket.parent) not in Path("/proc/net/unix").read_text()
    lock_directory(config.data).close()  # it is nobody's any more


class BrokenDrain(Daemon):
    async def _end_calls(self) -> None:
        await super()._end_calls()
        raise RuntimeError("injected: the drain failed")


def test_a_drain_that_fails_still_makes_everything_durable(
    flags: Flags, handlers: None, fleet: Fleet
) -> None:
    given = flags()
    config = load(settings(given))
    socket = Path(config.address.removeprefix("unix://"))

    async def run() -> None:
        daemon = BrokenDrain(config)
        running = asyncio.create_task(daemon.run())
        while not socket.exists():
            assert not running.done()
            await asyncio.sleep(0.01)
        client = await asyncio.to_thread(fleet.connect, config.address)
        await asyncio.to_thread(lambda: document(client, 20).store(client, durable=False))
        os.kill(os.getpid(), signal.SIGTERM)
        await running

    with pytest.raises(RuntimeError, match="injected"):
        asyncio.run(run())
    assert list(socket.parent.iterdir()) == []
    daemon = fleet.daemon(*given)
    assert "20 blocks" in daemon.ready


def test_a_daemon_whose_disk_cannot_be_closed_ends_with_a_line_and_a_status(flags: Flags) -> None:
    code = "import sys; from tests.server.test_ends import serve_broken; serve_broken(sys.argv[1:])"
    given = flags()
    with subprocess.Popen(
        [sys.executable, "-c", code, *given],
        cwd=ROOT_DIR,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("latentkv: serving on")
        store_a_block(given[3])
        process.terminate()
        assert process.wait(DEADLINE) == 2
        lines = process.stderr.read().splitlines()
    assert lines[-1] == "latentkv: injected: the disk cannot be closed"
    assert any("event=end_failed step=_close_stores" in line for line in lines)


def serve_broken(given: list[str]) -> None:
    """What ``latentkv serve`` does, over a disk that cannot be closed."""
    app = typer.Typer()

    @app.command()
    def serve() -> None:
        with one_line():
            run_daemon(load(settings(given)), broken)

    app([])


def test_a_stop_while_the_store_is_opened_ends_without_ever_listening(flags: Flags, handlers: None) -> None:
    given = settings(flags(http="127.0.0.1:0"))
    config = load(given)
    opened: list[Store] = []

    async def open_and_stop(settings: StoreSettings, observer: Observer) -> Store:
        os.kill(os.getpid(), signal.SIGTERM)
        opened.append(await Store.open(settings, observer=observer))
        return opened[0]

    asyncio.run(Daemon(config, open_and_stop).run())
    assert opened
    assert not Path(config.address.removeprefix("unix://")).parent.exists()
    lock_directory(config.data).close()  # the store was closed


# --- sockets


def test_a_stopping_daemon_leaves_the_sockets_of_the_one_that_took_its_place(
    fleet: Fleet, flags: Flags
) -> None:
    first = start(fleet, "mapped", flags)
    first.socket.unlink()  # somebody tidied up
    first.arena_socket.unlink()
    second = fleet.daemon(*flags(data=f"{first.socket.parent}/other"))
    assert first.term() == 0
    assert sorted(path.name for path in second.socket.parent.iterdir()) == [
        "kv.sock",
        "kv.sock.arena",
        "other",
    ]
    client = fleet.connect(second.url)
    doc = document(client, 3)
    doc.store(client)
    assert doc.load(client) == 3
    assert second.term() == 0
    assert [path.name for path in second.socket.parent.iterdir()] == ["other"]


def test_a_daemon_that_drains_gives_its_address_to_the_next_and_takes_nothing_back(
    fleet: Fleet, flags: Flags
) -> None:
    first = start(fleet, "mapped", flags)
    client = fleet.connect(first.url)
    doc = document(client, 3)
    doc.store(client)
    load = client.load(doc.namespace, doc.hashes)
    with load:
        next(iter(load))
        first.process.send_signal(signal.SIGTERM)
        first.wait_for("event=draining")
        second = fleet.daemon(*flags(data=f"{first.socket.parent}/other"))
    assert first.process.wait(DEADLINE) == 0
    other = fleet.connect(second.url)
    doc = document(other, 3)
    doc.store(other)
    assert doc.load(other) == 3


def test_of_many_that_start_at_once_one_gets_the_address_and_serves(fleet: Fleet, flags: Flags) -> None:
    socket = Path(flags()[3].removeprefix("unix://"))
    commands = [
        [sys.executable, "-m", "server", "serve", *flags(data=f"{socket.parent.parent}/d{number}")]
        for number in range(3)
    ]
    running = [
        subprocess.Popen(each, cwd=ROOT_DIR, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for each in commands
    ]
    try:
        firsts = [each.stdout.readline() for each in running if each.stdout]  # a line, or the end
        ready = [each for each, line in zip(running, firsts, strict=True) if line]
        assert len(ready) == 1
        losers = [each for each in running if each is not ready[0]]
        for each in losers:
            assert each.wait(DEADLINE) == 2
            assert each.stderr is not None
            assert "another daemon listens on" in each.stderr.read()
        client = fleet.connect(f"unix://{socket}")
        doc = document(client, 2)
        doc.store(client)
        assert doc.load(client) == 2
        ready[0].terminate()
        assert ready[0].wait(DEADLINE) == 0
        assert list(socket.parent.iterdir()) == []
    finally:
        for each in running:
            each.kill()
            each.communicate()


@pytest.mark.parametrize("name", ["a%41 b?c#d.sock", "ü\udcff%.sock"])
def test_a_socket_may_have_any_name(name: str, fleet: Fleet, flags: Flags) -> None:
    directory = Path(flags()[1]).parent
    path = f"{directory}/{name}"
    daemon = fleet.daemon(*flags(f"unix://{path}"))
    client = fleet.connect(f"unix://{path}")
    doc = document(client, 2)
    doc.store(client)
    assert doc.load(client) == 2
    assert os.path.exists(path)
    assert daemon.term() == 0
    assert not os.path.exists(path)


# --- standard output and error


@pytest.mark.parametrize("streams", ["full", "closed"])
def test_output_that_cannot_be_written_stops_nothing(streams: str, fleet: Fleet, flags: Flags) -> None:
    given = flags()
    redirected = {"full": ">/dev/full 2>/dev/full", "closed": "<&- >&- 2>&-"}[streams]
    socket = Path(given[3].removeprefix("unix://"))
    words = " ".join([sys.executable, "-m", "server", "serve", *given])
    process = subprocess.Popen(["sh", "-c", f"exec {words} {redirected}"], cwd=ROOT_DIR)
    try:
        until(lambda: socket.exists() or process.poll() is not None)
        client = fleet.connect(f"unix://{socket}")
        doc = document(client, 20)
        doc.store(client, durable=False)
        client.close()
        process.terminate()
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
    assert (Path(given[1]) / "LOCK").read_text() == f"{process.pid}\n"
    assert "20 blocks" in fleet.daemon(*given).ready


@pytest.mark.parametrize("words", ["--version", "config show --data /d"])
def test_a_command_whose_output_cannot_be_written_says_so_in_one_line(words: str) -> None:
    ran = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m server {words} >/dev/full"],
        cwd=ROOT_DIR,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert ran.stderr == "latentkv: standard output cannot be written: No space left on device\n"
