"""What this host's memory, disk and store can do: a synthetic document through a daemon of its own."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kvstore
from kvstore.api import KVStore, ReserveState
from kvstore.errors import DiskError, InvalidArgument
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import LatentLayout
from kvstore.namespace import Namespace
from kvstore.units import UnitKind, UnitMark
from latentkv.__main__ import command

DEPTH = 8  # requests in flight: as many as the daemon's readers
_PIECE = 4 << 20
_ROOM = 3  # times the document's bytes, on the disk
_CALL_SECONDS = 120.0
_RESERVE = 32

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Measured:
    """One step: so many bytes in so many seconds."""

    step: str
    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds


class SelfTest:
    """Steps over an empty directory below ``directory``, which goes with the context.

    Raises ``InvalidArgument`` for a directory without O_DIRECT or with too little room.
    """

    def __init__(self, directory: Path, nbytes: int, layout: LatentLayout, payloads: str) -> None:
        free = shutil.disk_usage(directory).free
        if free < _ROOM * nbytes:
            raise InvalidArgument(
                f"{directory} has {free} bytes free, and {_ROOM * nbytes} are needed; lower --size"
            )
        self._blocks = max(nbytes // layout.block_bytes, 1)
        self._layout = layout
        self._payloads = payloads
        self._scratch = tempfile.TemporaryDirectory(dir=directory, prefix="latentkv-bench-")
        self._data = Path(self._scratch.name)
        self._block = np.random.default_rng(0).integers(0, 256, layout.block_bytes, dtype=np.uint8)

    def close(self) -> None:
        """Remove the directory."""
        self._scratch.cleanup()

    def steps(self) -> Iterator[Measured]:
        """Everything, one after the other. Raises ``DiskError``, and what the store raises."""
        yield self._copy()
        yield from self._raw_disk()
        yield from self._store()

    def _copy(self) -> Measured:
        target = np.empty_like(self._block)
        target[:] = 0  # else its pages come with the copy

        def copies() -> None:
            for _ in range(self._blocks):
                np.copyto(target, self._block)

        return self._timed("memory, one copy", copies)

    def _timed(self, step: str, work: Callable[[], object]) -> Measured:
        began = time.perf_counter()
        work()
        return Measured(step, self._blocks * self._layout.block_bytes, time.perf_counter() - began)

    def _raw_disk(self) -> Iterator[Measured]:
        pieces = max(self._blocks * self._layout.block_bytes // _PIECE, 1)
        try:
            file = os.open(self._data / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError as error:
            raise InvalidArgument(
                f"{self._data.parent}: no O_DIRECT there ({error.strerror}); name a disk"
            ) from None
        try:
            os.posix_fallocate(file, 0, pieces * _PIECE)
            yield _raw("disk, written past the page cache", file, pieces, os.pwrite, os.fdatasync)
            yield _raw(
                "disk, read past the page cache", file, pieces, lambda fd, to, at: os.preadv(fd, [to], at)
            )
        finally:
            os.close(file)
            (self._data / "raw").unlink()

    def _store(self) -> Iterator[Measured]:
        hashes: list[bytes] = []
        with self._daemon() as url, contextlib.closing(kvstore.connect(url, timeout=_CALL_SECONDS)) as store:
            namespace = store.open_namespace(Namespace(self._layout, model="bench"))
            hashes = block_hashes(namespace, range(self._blocks * self._layout.block_tokens))
            tickets: list[int] = []
            began = time.perf_counter()
            yield self._timed(
                "store, until it can be read", lambda: tickets.append(self._put(store, namespace, hashes))
            )
            durable = store.durable(tickets[0], timeout=_CALL_SECONDS)
            if not durable:
                raise DiskError("the daemon could not write what was stored; see its log")
            yield Measured(
                "store, until it is on disk",
                self._blocks * self._layout.block_bytes,
                time.perf_counter() - began,
            )
            yield self._timed("load from HOST", lambda: self._get(store, namespace, hashes))
        with self._daemon() as url, contextlib.closing(kvstore.connect(url, timeout=_CALL_SECONDS)) as store:
            store.open_namespace(Namespace(self._layout, model="bench"))
            yield self._timed("load from DISK", lambda: self._get(store, namespace, hashes))

    @contextlib.contextmanager
    def _daemon(self) -> Iterator[str]:
        """A daemon over the data, in a process of its own."""
        total = self._blocks * self._layout.block_bytes
        with tempfile.TemporaryDirectory(prefix="latentkv-") as sockets:
            url = f"unix://{sockets}/kv.sock"
            settings = {
                "data": self._data / "store",
                "listen": url,
                "host-bytes": total + total // 4 + (128 << 20),
                "disk-bytes": 2 * total + (64 << 20),
                "payloads": self._payloads,
                "log-level": "error",
            }
            flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
            with subprocess.Popen(command("serve", *flags), stdout=subprocess.PIPE) as process:
                try:
                    assert process.stdout is not None
                    if not process.stdout.readline():
                        raise DiskError("the daemon of the test did not start; its last words are above")
                    yield url
                    process.terminate()
                    process.wait(_CALL_SECONDS)
                finally:
                    process.kill()

    def _put(self, store: KVStore, namespace: bytes, hashes: Sequence[bytes]) -> int:
        """Store a chain as a worker does: a copy into each slot. The last ticket."""
        lease = ticket = done = 0
        while done < len(hashes):
            parent = hashes[done - 1] if done else ROOT
            answer = store.reserve(namespace, parent, hashes[done : done + _RESERVE], lease=lease)
            lease = answer.lease
            filled = [block for block in answer.blocks if block.state is ReserveState.FILL]
            for block in filled:
                np.copyto(np.frombuffer(block.data, np.uint8), self._block)  # type: ignore[arg-type]
            done += len(filled)
            marks = [UnitMark(hashes[-1], UnitKind.REQUEST_END)] if done == len(hashes) else []
            ticket = store.commit(lease, [block.hash for block in filled], marks)
            if not filled:
                store.durable(ticket, timeout=_CALL_SECONDS)
        store.release(lease)
        return ticket

    def _get(self, store: KVStore, namespace: bytes, hashes: Sequence[bytes]) -> None:
        """Load a chain as a worker does: a copy out of each slot. Raises ``DiskError`` if it falls short."""
        target, seen = np.empty_like(self._block), 0
        with store.load(namespace, hashes, timeout=_CALL_SECONDS) as load:
            for batch in load:
                for block in batch:
                    np.copyto(target, np.frombuffer(block.data, np.uint8))
                    seen += 1
        if seen != len(hashes) or not np.array_equal(target, self._block):
            raise DiskError(f"{seen} of {len(hashes)} blocks came back; see the daemon's log")


def _raw(
    step: str,
    file: int,
    pieces: int,
    move: Callable[[int, mmap.mmap, int], int],
    finish: Callable[[int], None] = lambda fd: None,
) -> Measured:
    """Move a file piece by piece, ``DEPTH`` at a time."""
    buffers = [mmap.mmap(-1, _PIECE) for _ in range(DEPTH)]  # page-aligned
    for buffer in buffers:
        buffer.write(np.random.default_rng(1).bytes(_PIECE))

    def lane(number: int) -> None:
        for piece in range(number, pieces, DEPTH):
            if move(file, buffers[number], piece * _PIECE) != _PIECE:
                raise DiskError(f"{step}: a request was cut short")

    with ThreadPoolExecutor(DEPTH) as threads:
        began = time.perf_counter()
        list(threads.map(lane, range(DEPTH)))
        finish(file)
        seconds = time.perf_counter() - began
    return Measured(step, pieces * _PIECE, seconds)
