"""LMCache's server on blocks of the same size, for ``data_path --peers lmcache``.

It is installed, pinned and without the parts that need CUDA, into an environment of its own beside
the data, where it stays for the next run. Measured in the ways its documentation has for a worker
that is on the CPU, each figure being that of the better one: the server copies (``lmcache_driven``),
or the worker does, over shared memory (``engine_driven``). Its disk tier is its native one with
direct I/O and eight threads, its memory is large enough for all. One thread for torch: with more, copies
were up to ten times slower here.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from benchmarks import page_cache
from kvstore.layout import DType, LatentLayout

VERSION = "0.5.6"
# What its server and its benchmark client import; ``--no-deps`` leaves the CUDA parts out.
REQUIREMENTS = (
    "aiofile aiofiles blake3 aiohttp cryptography fastapi httpx msgspec numba nvtx"
    " opentelemetry-api<=1.40.0 opentelemetry-sdk opentelemetry-exporter-otlp"
    " opentelemetry-exporter-prometheus<=0.61b0 prometheus_client<=0.24.1 psutil py-cpuinfo pyyaml pyzmq"
    " grpcio>=1.78 protobuf<7 redis safetensors sortedcontainers transformers==5.24.0 uvicorn httptools"
    " cachetools huggingface_hub torch==2.13.0 numpy<=2.2.6"
)
CHUNKS = (64, 256)  # tokens
MODES = ("lmcache_driven", "engine_driven")
MAX_BLOCKS = 256  # its memory holds several such documents
MAX_ROUNDS = 5
WARM_LOADS = 3  # a round
DOCUMENT = 0  # seed of the one that is loaded
_PATIENCE = 120.0  # seconds
_SHARED = Path("/dev/shm")
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
}


class PeerUnavailable(Exception):
    """The peer cannot be measured here; the message says why."""


class Subject(Protocol):
    """What is to be stored."""

    @property
    def layout(self) -> LatentLayout: ...

    @property
    def blocks(self) -> int: ...


@dataclass
class _Seconds:
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    lookup: list[float] = field(default_factory=list)  # of warm loads


class LmcachePeer:
    """LMCache in ``place``, its environment beside it."""

    def __init__(self, place: Path, subject: Subject) -> None:
        self._place = place
        self._home = place.parent / f"lmcache-{VERSION}"
        self._python = self._home / "bin" / "python"
        self._layout = subject.layout
        self._blocks = min(subject.blocks - subject.blocks % 4 or 4, MAX_BLOCKS)

    def measure(self, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
        """Figures for each chunk size. Raises ``PeerUnavailable``."""
        if self._layout.dtype is not DType.BF16 or self._layout.strips:
            raise PeerUnavailable("only layouts of bf16 entries are laid out for it")
        self._install()
        runs = []
        for chunk in CHUNKS:
            modes = {mode: self._rounds(mode, chunk, min(rounds, MAX_ROUNDS)) for mode in MODES}
            runs.append(self._figures(chunk, modes))
            say(
                f"lmcache {VERSION}, chunks of {chunk}: cold {runs[-1]['cold_gbps']:.2f},"
                f" warm {runs[-1]['warm_gbps']:.2f}, store {runs[-1]['store_gbps']:.2f} GB/s"
            )
        return {"version": VERSION, "blocks": self._blocks, "runs": runs}

    def _figures(self, chunk: int, modes: dict[str, _Seconds]) -> dict[str, Any]:
        nbytes = self._blocks * self._layout.block_bytes
        by_mode = {
            mode: {
                "cold_gbps": nbytes / median(found.cold) / 1e9,
                "warm_gbps": nbytes / median(found.warm) / 1e9,
                "store_gbps": nbytes / median(found.store) / 1e9,
                "lookup_ms": 1e3 * median(found.lookup),
            }
            for mode, found in modes.items()
        }
        best: dict[str, Any] = {
            way: max(figures[way] for figures in by_mode.values())
            for way in ("cold_gbps", "warm_gbps", "store_gbps")
        }
        best["lookup_ms"] = min(figures["lookup_ms"] for figures in by_mode.values())
        return {"chunk_tokens": chunk, **best, "modes": by_mode}

    def _install(self) -> None:
        ready = self._home / "ready"
        if ready.exists():
            return
        pip = [str(self._python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", str(self._home)],
            [*pip, *REQUIREMENTS.split()],
            [*pip, "--no-deps", f"lmcache=={VERSION}"],
        ):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                raise PeerUnavailable(f"it cannot be installed: {(done.stdout.splitlines() or ['?'])[-1]}")
        ready.touch()

    def _rounds(self, mode: str, chunk: int, rounds: int) -> _Seconds:
        disk = self._place / f"lmcache-{mode}-{chunk}"
        disk.mkdir()
        found = _Seconds()
        with self._session(disk, mode, chunk) as session:
            session.seconds("store", DOCUMENT)
            self._wait_for_disk(disk)
        for number in range(1, rounds + 1):
            page_cache.drop(disk)
            with self._session(disk, mode, chunk) as session:
                found.cold.append(session.seconds("load", DOCUMENT))
                for _ in range(WARM_LOADS):
                    found.warm.append(session.seconds("load", DOCUMENT))
                    found.lookup.append(session.lookup_seconds)
                found.store.append(session.seconds("store", number))
        return found

    def _wait_for_disk(self, disk: Path) -> None:
        """Until the document has been written: it says nowhere when that is."""
        end = time.monotonic() + _PATIENCE
        while (
            sum(file.stat().st_size for file in disk.rglob("*.data"))
            < self._blocks * self._layout.block_bytes
        ):
            if time.monotonic() > end:
                raise PeerUnavailable("it does not write the document to its disk tier")
            time.sleep(0.2)

    @contextmanager
    def _session(self, disk: Path, mode: str, chunk: int) -> Iterator[_Session]:
        """A server that has just been started, and a worker."""
        with contextlib.ExitStack() as stack:
            port = _free_port()
            # It leaves its memory behind when it is killed.
            stack.callback((_SHARED / _segment(port)).unlink, missing_ok=True)
            server = self._spawn(stack, self._server_command(disk, mode, chunk, port))
            _wait_for_port(port, server)
            shape = (1, self._blocks, self._layout.block_tokens, 1, self._layout.width)
            driver = self._spawn(
                stack,
                [
                    str(Path(__file__).with_name("lmcache_driver.py")),
                    f"tcp://localhost:{port}",
                    mode,
                    f"({','.join(map(str, shape))}):bfloat16:{self._layout.num_layers}",
                    str(self._blocks * self._layout.block_tokens),
                ],
            )
            session = _Session(driver)
            session.receive()
            yield session
            session.end()

    def _spawn(self, stack: contextlib.ExitStack, command: list[str]) -> subprocess.Popen[str]:
        log = stack.enter_context((self._place / "lmcache.log").open("ab"))
        process = subprocess.Popen(
            [str(self._python), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    def _server_command(self, disk: Path, mode: str, chunk: int, port: int) -> list[str]:
        memory = 2 + 5 * self._blocks * self._layout.block_bytes // (1 << 30)
        adapter = {"type": "fs_native", "base_path": str(disk), "num_workers": 8, "use_odirect": True}
        return [
            *("-m", "lmcache.v1.multiprocess.server", "--port", str(port), "--chunk-size", str(chunk)),
            *("--supported-transfer-mode", mode, "--max-workers", "2", "--disable-observability"),
            *("--l1-size-gb", str(memory), "--no-l1-use-lazy", "--eviction-policy", "LRU"),
            # So that what came from disk stays in memory, and a second load is a warm one.
            *("--l2-adapter", json.dumps(adapter), "--l2-prefetch-policy", "retain"),
            *("--null-block-id", "-1"),  # or else the first block of the pool would not be stored
            *(("--shm-name", _segment(port)) if mode == "engine_driven" else ()),
        ]


class _Session:
    """Commands to the driver."""

    def __init__(self, driver: subprocess.Popen[str]) -> None:
        self._driver = driver
        self.lookup_seconds = 0.0

    def receive(self) -> dict[str, Any]:
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        if not line:
            raise PeerUnavailable("its client ended; see lmcache.log in the data directory")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def seconds(self, verb: str, seed: int) -> float:
        """Let it store or load a document. Raises ``PeerUnavailable`` if it did so in part only."""
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps({"op": verb, "seed": seed}) + "\n")
        self._driver.stdin.flush()
        answer = self.receive()
        if not answer["whole"]:
            raise PeerUnavailable(f"it did not {verb} the whole document")
        self.lookup_seconds = answer.get("lookup_seconds", 0.0)
        return float(answer["seconds"])

    def end(self) -> None:
        """Let it give up what it shares."""
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        self._driver.wait(_PATIENCE)


def _segment(port: int) -> str:
    """Name of the shared memory of the server on a port."""
    return f"lmcache-{port}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(port: int, server: subprocess.Popen[str]) -> None:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
            return
        time.sleep(0.1)
    raise PeerUnavailable("its server did not start; see lmcache.log in the data directory")
