"""What the machine can do at best: its disk past the page cache, and its memory."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from benchmarks.options import BenchmarkError

DEPTHS = (1, 2, 4, 8)  # of the queue: threads with one request each in flight
_PAGE = 4096


class RawDisk:
    """A file of ``blocks`` blocks, read and written in whole blocks with O_DIRECT.

    It is written once before anything is timed, so a timed write finds its place on disk: that is
    the fastest a file can be written. Raises ``BenchmarkError`` where O_DIRECT is not to be had.
    """

    def __init__(self, path: Path, block_bytes: int, blocks: int) -> None:
        self._block_bytes = block_bytes
        self._step = -(-block_bytes // _PAGE) * _PAGE
        self._blocks = blocks
        # Random bytes, since a disk may find short ways for others; and shared memory, since the
        # blocks of a store must go there: the system may give it smaller pages than to others.
        noise = np.frombuffer(np.random.default_rng(0).bytes(max(DEPTHS) * self._step), np.uint8)
        self._memory = _shared(max(DEPTHS), self._step)
        self._memory.view(-1).numpy()[:] = noise
        self._buffers = [memoryview(row.numpy()) for row in self._memory]
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError as error:
            raise BenchmarkError(
                f"{path}: no O_DIRECT there ({error.strerror}), so no limit to compare with; use --data"
            ) from None
        os.posix_fallocate(self._fd, 0, blocks * self._step)
        self.write(max(DEPTHS))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def read(self, depth: int) -> float:
        """Bytes a second of reading all blocks, ``depth`` at a time."""
        return self._timed(depth, lambda buffer, at: self._whole(os.preadv(self._fd, [buffer], at)))

    def write(self, depth: int) -> float:
        """Bytes a second of writing all blocks and one fdatasync."""
        return self._timed(
            depth,
            lambda buffer, at: self._whole(os.pwritev(self._fd, [buffer], at)),
            lambda: os.fdatasync(self._fd),
        )

    def _whole(self, done: int) -> None:
        if done != self._step:
            raise BenchmarkError(f"the disk moved {done} of {self._step} bytes; measure on another one")

    def _timed(
        self, depth: int, move: Callable[[memoryview, int], None], finish: Callable[[], None] = lambda: None
    ) -> float:
        blocks = count()

        def work(buffer: memoryview) -> None:
            for block in blocks:  # shared: the next block goes to whoever is free
                if block >= self._blocks:
                    return
                move(buffer, block * self._step)

        with ThreadPoolExecutor(depth) as threads:
            started = time.perf_counter()
            for done in threads.map(work, self._buffers[:depth]):
                assert done is None
            finish()
            seconds = time.perf_counter() - started
        return self._blocks * self._block_bytes / seconds


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


def _shared(rows: int, columns: int) -> torch.Tensor:
    made: torch.Tensor = torch.empty(rows, columns, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    return made
