"""The ranks of a server as processes that answer one question after the other, all the same ones."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.server.conftest import DEADLINE

# Started once, with what takes long to import; the ranks are forked off it before they have threads.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["tests.engines.sglang_engine", "mla.adapters.sglang", "tests.engines.vllm_ranks", "mla.adapters.vllm"]
)


class RankProcesses:
    """``begin(rank, *given)`` makes a rank in its process, an object whose methods are asked by name."""

    def __init__(self, count: int, begin: Callable[..., Any], *given: object) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = _PROCESSES.Pipe()
            process = _PROCESSES.Process(target=_serve, args=(theirs, begin, rank, given), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, method: str, *given: object) -> list[Any]:
        """What each answers, the first rank first; they work at the same time."""
        for pipe in self._pipes:
            pipe.send((method, given))
        assert all(pipe.poll(2 * DEADLINE) for pipe in self._pipes), "a rank hangs"
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        """Close each rank and end its process."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(DEADLINE)
            process.kill()


def _serve(pipe: Connection, begin: Callable[..., Any], rank: int, given: tuple[object, ...]) -> None:
    made = begin(rank, *given)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            made.close()
            return
        pipe.send(getattr(made, method)(*arguments))
