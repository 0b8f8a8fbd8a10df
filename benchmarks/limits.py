"""What the machine can do at best: its disk past the page cache, and its memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
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
        self._memory = torch.empty(max(DEPTHS), self._step, dtype=torch.uint8).share_memory_()
        self._memory.view(-1).numpy()[:] = noise
        self._buffers = [memoryview(row.numpy()) for row in self._memory]
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError as error:
            raise BenchmarkError(
                f"{path}: no O_DIRECT there ({error.strerror}), so there is no limit to compare with; use --data"
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
    """Copies of whole blocks between two tensors in shared memory, on one thread: torch's own ``copy_``."""

    def __init__(self, block_bytes: int, blocks: int) -> None:
        self._source, self._target = (
            torch.full((blocks, block_bytes), fill, dtype=torch.uint8).share_memory_() for fill in (1, 2)
        )

    def copy(self) -> float:
        """Bytes a second of copying all blocks."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            started = time.perf_counter()
            for target, source in self._pairs():
                target.copy_(source)
            seconds = time.perf_counter() - started
        finally:
            torch.set_num_threads(threads)
        return self._source.numel() / seconds

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self._target, self._source, strict=True)
