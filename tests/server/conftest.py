"""Real daemons in processes of their own, and documents to store in them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import kvstore
from kvstore.api import KVStore, ReserveState
from kvstore.client import Client
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import DType, LatentLayout
from kvstore.namespace import Namespace
from kvstore.units import UnitKind, UnitMark

# A process whose coverage is measured must end by itself to tell what it ran.
MEASURED = "COVERAGE_PROCESS_CONFIG" in os.environ
ROOT_DIR = Path(__file__).parents[2]
SMALL = LatentLayout(num_layers=2, latent_rank=32, rope_dim=16, dtype=DType.FP32)
DEADLINE = 30.0  # seconds after which a test has failed; nothing is timed by it


class DaemonProcess:
    """``python -m server serve`` with its log; ``url`` is what its ready line says."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._news = threading.Condition()
        self.start()

    def start(self) -> None:
        self.log: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server", "serve", *self._flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT_DIR,
            env=os.environ | {"PYTHONFAULTHANDLER": "1"},
        )
        threading.Thread(target=self._collect, daemon=True).start()
        assert self.process.stdout is not None
        # One that hangs at its start says where: its stacks are in the log.
        watchdog = threading.Timer(DEADLINE, self.process.send_signal, [signal.SIGABRT])
        watchdog.start()
        self.ready = self.process.stdout.readline()
        watchdog.cancel()
        assert self.ready.startswith("latentkv: serving on "), (self.ready, self.log)
        self.url = self.ready.split()[3]

    def _collect(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.log.append(line)
                self._news.notify_all()

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until so many lines of the log have the text."""
        with self._news:
            assert self._news.wait_for(lambda: sum(text in line for line in self.log) >= count, DEADLINE), (
                self.log
            )

    @property
    def socket(self) -> Path:
        return Path(self.url.removeprefix("unix://"))

    @property
    def arena_socket(self) -> Path:
        return self.socket.with_name(self.socket.name + ".arena")

    def term(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)

    def restart(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.start()

    def close(self) -> None:
        if self.process.poll() is None:
            if MEASURED:
                self.process.send_signal(signal.SIGCONT)
                self.term()
            else:
                self.kill()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@dataclass
class Document:
    """A chain of blocks whose bytes follow from their hashes."""

    namespace: bytes
    tokens: list[int]
    hashes: list[bytes]
    nbytes: int = SMALL.block_bytes

    def data(self, block: bytes) -> bytes:
        return random.Random(block).randbytes(self.nbytes)

    def store(self, store: KVStore, *, durable: bool = True) -> int:
        """Store all blocks and the unit at the end, however often the arena is full."""
        done, lease, ticket = 0, 0, 0
        while done < len(self.hashes):
            parent = self.hashes[done - 1] if done else ROOT
            answer = store.reserve(self.namespace, parent, self.hashes[done:], lease=lease)
            lease = answer.lease
            ready = [block for block in answer.blocks if block.state is not ReserveState.RETRY]
            filled = [block for block in ready if block.state is ReserveState.FILL]
            for block in filled:
                assert block.data is not None
                block.data[:] = self.data(block.hash)
            done += len(ready)
            end = [UnitMark(self.hashes[-1], UnitKind.REQUEST_END)] if done == len(self.hashes) else []
            ticket = store.commit(lease, [block.hash for block in filled], end)
            if durable:
                assert store.durable(ticket)
        store.release(lease)
        return ticket

    def load(self, store: KVStore, first: int = 0, *, timeout: float = DEADLINE) -> int:
        """Load and verify every byte; how many leading blocks are usable."""
        seen = first
        with store.load(self.namespace, self.hashes, first=first, timeout=timeout) as load:
            for batch in load:
                for block in batch:
                    assert block.index == seen
                    assert block.data == self.data(self.hashes[seen])
                    seen += 1
        assert load.short in (None, seen)
        return seen


@dataclass
class Fleet:
    """Starts daemons and clients and ends them all."""

    daemons: list[DaemonProcess] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    def daemon(self, *flags: str) -> DaemonProcess:
        daemon = DaemonProcess(*flags)
        self.daemons.append(daemon)
        return daemon

    def connect(self, url: str, timeout: float = DEADLINE) -> Client:
        client = kvstore.connect(url, timeout=timeout)
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for daemon in self.daemons:
            daemon.close()


@contextmanager
def flag_maker() -> Iterator[Callable[..., list[str]]]:
    """Flags of a small daemon over one directory; the socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="latentkv-") as directory:

        def make(listen: str | None = None, **settings: object) -> list[str]:
            chosen = {
                "data": f"{directory}/data",
                "listen": listen or f"unix://{directory}/run/kv.sock",
                "host-bytes": "64MiB",
                "disk-bytes": "256MiB",
                "drain-seconds": 20,
                **{name.replace("_", "-"): value for name, value in settings.items()},
            }
            return [part for name, value in chosen.items() for part in (f"--{name}", str(value))]

        yield make


@pytest.fixture
def flags() -> Iterator[Callable[..., list[str]]]:
    with flag_maker() as make:
        yield make


@pytest.fixture
def fleet(flags: Callable[..., list[str]]) -> Iterator[Fleet]:
    """Ends before the directory of ``flags`` goes: what drains still writes there."""
    fleet = Fleet()
    yield fleet
    fleet.close()


def page_of(daemon: DaemonProcess) -> str:
    """Where the daemon's HTTP port is, by its ready line."""
    return daemon.ready.split(" http ")[1].split(",")[0]


MODES = ("mapped", "unix-bytes", "tcp-bytes")


def start(fleet: Fleet, mode: str, flags: Callable[..., list[str]], **settings: object) -> DaemonProcess:
    """A daemon whose clients map the arena, cannot get at it, or come over TCP."""
    listen = "127.0.0.1:0" if mode == "tcp-bytes" else None
    daemon = fleet.daemon(*flags(listen, **settings))
    if mode == "unix-bytes":
        daemon.arena_socket.unlink()
    return daemon


def document(
    store: KVStore, blocks: int, *, seed: int = 0, layout: LatentLayout = SMALL, tenant: str = "default"
) -> Document:
    """A document of so many blocks and one more token."""
    namespace = store.open_namespace(Namespace(layout, model="test", tenant=tenant))
    tokens = [seed, *range(64 * blocks)]
    return Document(namespace, tokens, block_hashes(namespace, tokens), layout.block_bytes)
