"""Worker processes that load documents at the same time."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import torch

from benchmarks.options import BenchmarkError
from benchmarks.worker import PATIENCE, Worker
from kvstore.layout import LatentLayout

POOL_BLOCKS = 32  # of each worker, filled round and round
_MATCH_PAUSE = 0.02  # seconds between Matches, so that they are a probe and no load
_FIRST_SEED = 100


@dataclass(frozen=True)
class Turn:
    """What one worker loaded. Blocks and seconds are those in which all of them were at work."""

    blocks: int
    seconds: float
    all_blocks: int


class Crowd:
    """``size`` workers, each in a process of its own, and as many documents of ``blocks`` blocks.

    They are stored when it is entered. Raises ``BenchmarkError`` when a worker ends early.
    """

    def __init__(self, url: str, layout: LatentLayout, size: int, blocks: int) -> None:
        self._size = size
        context = multiprocessing.get_context("spawn")
        self._workers = []
        for number in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, url, layout, size, blocks), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
            ours.send(number)

    def __enter__(self) -> Self:
        for _, pipe in self._workers:  # each has stored its document
            self._receive(pipe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, pipe in self._workers:
            pipe.close()  # ends its loop
            process.join(10)
            process.kill()

    def turn(self, workers: int, seconds: float, meanwhile: Callable[[], None]) -> list[Turn]:
        """Let some workers load for some seconds, and call ``meanwhile`` now and then."""
        active = [pipe for _, pipe in self._workers[:workers]]
        start = time.monotonic() + 0.2
        for number, pipe in enumerate(active):
            documents = [d for d in range(self._size) if d % workers == number]
            pipe.send((start, start + seconds, documents))
        time.sleep(max(0.0, start - time.monotonic()))
        while time.monotonic() < start + seconds:
            meanwhile()
            time.sleep(_MATCH_PAUSE)
        return [self._receive(pipe) for pipe in active]

    @staticmethod
    def _receive(pipe: Connection) -> Turn:
        try:
            if not pipe.poll(2 * PATIENCE):
                raise BenchmarkError("a worker does not answer")
            turn: Turn = pipe.recv()
            return turn
        except (EOFError, ConnectionResetError):
            raise BenchmarkError("a worker ended; its last words are above") from None


def _work(pipe: Connection, url: str, layout: LatentLayout, size: int, blocks: int) -> None:
    """A worker process: store one document, then load others when told to."""
    torch.set_num_threads(1)
    number: int = pipe.recv()
    with Worker(url, layout, POOL_BLOCKS) as worker:
        worker.meet()
        documents = [worker.document(_FIRST_SEED + d, blocks) for d in range(size)]
        worker.store_durably(documents[number])
        pipe.send(Turn(0, 0.0, 0))
        while True:
            try:
                start, stop, own = pipe.recv()
            except (EOFError, ConnectionResetError):
                return
            pipe.send(_load(worker, [documents[d] for d in own], start, stop))


def _load(worker: Worker, documents: list[list[bytes]], start: float, stop: float) -> Turn:
    time.sleep(max(0.0, start - time.monotonic()))
    inside = total = turn = 0
    while time.monotonic() < stop:
        arrivals = worker.arrivals(documents[turn % len(documents)])
        total += len(arrivals)
        inside += sum(arrival < stop for arrival in arrivals)
        turn += 1
    return Turn(inside, stop - start, total)
