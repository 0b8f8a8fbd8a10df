"""What the machine can do at best: its disk past the page cache, and its memory."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from benchmarks.options import BenchmarkError
from benchmarks.page_cache import extents
from kvstore.memory import allocate_shared

DEPTHS = (1, 2, 4, 8)  # of the queue: threads with one request each in flight
BARE_DEPTH = max(DEPTHS)
SPARE_BLOCKS = 128  # more than caches hold
_PAGE = 4096
Places: TypeAlias = list[tuple[int, int]]  # descriptor and offset


class RawDisk:
    """Block-sized requests past the page cache, on one thread for each that is in flight.

    Writes go to a file of ``blocks`` blocks that was written before, so they find their place on
    disk: that is the fastest a file can be written. Reads go to files that others wrote: to the very
    bytes that the store reads. Raises ``BenchmarkError`` where O_DIRECT is not to be had.
    """

    def __init__(self, path: Path, block_bytes: int, blocks: int) -> None:
        self._block_bytes = block_bytes
        self._step = -(-block_bytes // _PAGE) * _PAGE
        # The memory of an arena, a piece for each block, as loaded blocks need it: how scattered
        # its pages lie in physical memory makes the disk up to twice as slow.
        self._memory = _shared_bytes(blocks * self._step)
        self._buffers = [self._memory[at : at + self._step] for at in range(0, len(self._memory), self._step)]
        noise = np.random.default_rng(0)
        for buffer in self._buffers:  # random, since a disk may find short ways for other bytes
            buffer[:] = noise.bytes(self._step)
        self._spare = _shared_bytes(
            min(blocks, SPARE_BLOCKS) * self._step
        )  # where the bare ways copy to and from
        self._files = ExitStack()
        own = self._opened(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(own, 0, blocks * self._step)
        self._own = [(own, block * self._step) for block in range(blocks)]
        self.write(max(DEPTHS))

    def _opened(self, path: Path, flags: int) -> int:
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            raise BenchmarkError(
                f"{path}: no O_DIRECT there ({error.strerror}), so no limit to compare with; use --data"
            ) from None
        self._files.callback(os.close, fd)
        return fd

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def places(self, files: Iterable[Path]) -> Places:
        """Where ``blocks`` blocks can be read in the written parts of files. Raises ``BenchmarkError``."""
        found: Places = []
        for path in files:
            fd = self._opened(path, os.O_RDONLY)
            for start, stop in extents(fd):
                found += [(fd, at) for at in range(start, stop - self._step + 1, self._step)]
        if len(found) < len(self._buffers):
            raise BenchmarkError(f"only {len(found)} of {len(self._buffers)} blocks are in the store's files")
        return found[: len(self._buffers)]

    def read(self, depth: int, places: Places) -> float:
        """Bytes a second of reading blocks, ``depth`` at a time."""
        return self._timed(depth, places, lambda fd, buffer, at: self._whole(os.preadv(fd, [buffer], at)))

    def write(self, depth: int) -> float:
        """Bytes a second of writing all blocks and one fdatasync."""
        return self._timed(
            depth,
            self._own,
            lambda fd, buffer, at: self._whole(os.pwritev(fd, [buffer], at)),
            self._sync,
        )

    def read_bare(self, places: Places) -> float:
        """Bytes a second of reading, checking and copying blocks by nothing but the calls that do it.

        What any load must do: xxh3 behind each read, and one thread that copies block after block.
        """
        arrived: queue.SimpleQueue[memoryview] = queue.SimpleQueue()

        def move(fd: int, buffer: memoryview, at: int) -> None:
            self._whole(os.preadv(fd, [buffer], at))
            xxh3_64_intdigest(buffer)
            arrived.put(buffer)

        with ThreadPoolExecutor(1) as copier:
            copied = copier.submit(self._copy_out, arrived, len(places))
            return self._timed(BARE_DEPTH, places, move, lambda: copied.result())

    def write_bare(self) -> float:
        """Bytes a second of copying, checking and writing blocks by nothing but the calls that do it.

        What any store must do: one thread copies block after block, xxh3 before each write, one fdatasync.
        """
        filled: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        begun = threading.Event()

        def move(fd: int, _: memoryview, at: int) -> None:
            begun.set()
            buffer = filled.get()
            xxh3_64_intdigest(buffer)
            self._whole(os.pwritev(fd, [buffer], at))

        with ThreadPoolExecutor(1) as copier:
            copier.submit(self._copy_in, begun, filled)
            return self._timed(BARE_DEPTH, self._own, move, self._sync)

    def _copy_in(self, begun: threading.Event, filled: queue.SimpleQueue[memoryview]) -> None:
        begun.wait()  # for the clock
        for at, buffer in enumerate(self._buffers):
            _memmove(buffer, self._spare_block(at))
            filled.put(buffer)

    def _copy_out(self, arrived: queue.SimpleQueue[memoryview], blocks: int) -> None:
        for at in range(blocks):
            _memmove(self._spare_block(at), arrived.get())

    def _spare_block(self, at: int) -> memoryview:
        start = at * self._step % len(self._spare)
        return self._spare[start : start + self._step]

    def _sync(self) -> None:
        os.fdatasync(self._own[0][0])

    def _whole(self, done: int) -> None:
        if done != self._step:
            raise BenchmarkError(f"the disk moved {done} of {self._step} bytes; measure on another one")

    def _timed(
        self,
        depth: int,
        places: Places,
        move: Callable[[int, memoryview, int], None],
        finish: Callable[[], None] = lambda: None,
    ) -> float:
        requests = iter(zip(places, self._buffers, strict=True))  # shared: the next goes to who is free
        turn = threading.Lock()

        def work(_: int) -> None:
            while True:
                with turn:
                    request = next(requests, None)
                if request is None:
                    return
                (fd, at), buffer = request
                move(fd, buffer, at)

        with ThreadPoolExecutor(depth) as threads:
            started = time.perf_counter()
            for done in threads.map(work, range(depth)):
                assert done is None
            finish()
            seconds = time.perf_counter() - started
        return len(places) * self._block_bytes / seconds


class Memcpy:
    """The C library's memcpy of whole blocks between two tensors in shared memory, on one thread."""

    def __init__(self, block_bytes: int, blocks: int) -> None:
        self._source, self._target = _shared(blocks, block_bytes), _shared(blocks, block_bytes)
        self._source.fill_(1)
        self._target.fill_(2)

    def copy(self) -> float:
        """Bytes a second of copying all blocks."""
        rows = zip(self._target, self._source, strict=True)
        blocks = [(target.data_ptr(), source.data_ptr()) for target, source in rows]
        nbytes = self._source.shape[1]
        started = time.perf_counter()
        for target, source in blocks:
            ctypes.memmove(target, source, nbytes)
        return len(blocks) * nbytes / (time.perf_counter() - started)

    @property
    def copied(self) -> bool:
        """Whether the target holds what the source does."""
        return torch.equal(self._source, self._target)


def _shared_bytes(nbytes: int) -> memoryview:
    fd, memory = allocate_shared(nbytes)
    os.close(fd)
    return memoryview(memory)


def _shared(rows: int, columns: int) -> torch.Tensor:
    return torch.frombuffer(_shared_bytes(rows * columns), dtype=torch.uint8).view(rows, columns)


def _memmove(target: memoryview, source: memoryview) -> None:
    """Without the interpreter's lock."""
    to, of = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (target, source))
    ctypes.memmove(to, of, len(source))
