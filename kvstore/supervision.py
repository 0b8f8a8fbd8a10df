"""What has to run as long as its owner: watched, counted when it fails, and started again.

A background task that dies would otherwise be noticed by nobody: its exception waits in a task that
nobody awaits, while everything else goes on and says that all is well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

log = logging.getLogger(__name__)

PAUSES = (0.05, 0.2, 1.0, 2.0)  # seconds before each new start; after one failure more it is given up
STEADY_SECONDS = 60.0  # after which a failure counts as the first again

Work = Callable[[], Coroutine[Any, Any, None]]


class Supervisor:
    """Runs named tasks, and starts each again that ends before it should. Owned by one event loop.

    Each failure is logged with its traceback and counted in ``task_failures``. One that fails again
    and again is given up: then ``gave_up`` is set, ``why`` says what happened, and the owner ends.
    Work that returns has ended well.
    """

    def __init__(self, counters: Counter[str], pauses: Sequence[float] = PAUSES) -> None:
        self._counters = counters
        self._pauses = pauses
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.restarting: set[str] = set()  # names of those that have failed and do not run again yet
        self.gave_up = asyncio.Event()
        self.why: str | None = None

    @property
    def names(self) -> list[str]:
        """Of the tasks that are to run."""
        return list(self._keepers)

    def start(self, name: str, work: Work) -> None:
        """Run ``work()`` from now on. Called anew after a failure, it goes on from where things are."""
        self._keepers[name] = asyncio.create_task(self._keep(name, work))

    async def _keep(self, name: str, work: Work) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            error = await self._run(name, work)
            if error is None:
                return
            failures = 1 if time.monotonic() - began >= STEADY_SECONDS else failures + 1
            self._counters["task_failures"] += 1
            self.restarting.add(name)
            if failures > len(self._pauses):
                self._give_up(name, failures, error)
                return
            pause = self._pauses[failures - 1]
            log.error("event=task_failed task=%s failures=%d", name, failures, exc_info=error)
            await asyncio.sleep(pause)
            self.restarting.discard(name)

    async def _run(self, name: str, work: Work) -> BaseException | None:
        """Run it to its end; what it failed with. Cancelled by anybody but ``stop`` it has failed too."""
        task = self._tasks[name] = asyncio.create_task(work(), name=f"latentkv-{name}")
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        if task.cancelled():
            return asyncio.CancelledError(f"{name} was cancelled")
        return task.exception()

    def _give_up(self, name: str, failures: int, error: BaseException) -> None:
        log.critical("event=task_given_up task=%s failures=%d", name, failures, exc_info=error)
        self.fail(f"the background task {name} failed {failures} times in a row, last with {error!r}")

    def fail(self, why: str) -> None:
        """Something is wrong that no new start can mend: the owner has to end."""
        self.why = self.why or why
        self.gave_up.set()

    def watch(self, task: asyncio.Task[None]) -> None:
        """A task that handles its own failures: if one comes out all the same, tables may be wrong."""
        task.add_done_callback(self._look)

    def _look(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._counters["task_failures"] += 1
        log.critical("event=task_given_up task=%s", task.get_name(), exc_info=error)
        self.fail(f"the background task {task.get_name()} failed with {error!r}")

    def kill(self, name: str) -> None:
        """Let a task die, as a defect would; it is started again. For tests and soaks."""
        self._tasks[name].cancel()

    async def ended(self, name: str) -> None:
        """Wait until a task has ended well or was given up."""
        if name in self._keepers:
            await asyncio.wait({self._keepers[name]})

    async def stop(self, *names: str) -> None:
        """End these tasks, whatever they are at; those that do not run are ignored."""
        keepers = [self._keepers.pop(name) for name in names if name in self._keepers]
        for keeper in keepers:
            keeper.cancel()
        if keepers:
            await asyncio.wait(keepers)
        self.restarting.difference_update(names)
