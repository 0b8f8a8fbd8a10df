"""A daemon over a disk that fails on demand, for tests and soaks; no daemon of yours.

    python -m server.testing --data DIR --listen unix:///DIR/kv.sock

It is ``latentkv serve`` with ``kvstore.testing`` below its store. Each line of JSON on its standard
input sets switches of ``Faults``, steps the store's wall clock, or kills a background task
(``{"kill_task": "writer"}``), and is answered by one on its standard output that says what is held and
which invariants are violated.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from dataclasses import asdict
from typing import Any

import typer

from kvstore.observer import Observer
from kvstore.payloads.kinds import OPEN
from kvstore.settings import StoreSettings
from kvstore.store import Store
from kvstore.testing.clocks import SteppedClock
from kvstore.testing.faults import Faults
from server.commands.failures import one_line
from server.commands.serve import run_daemon
from server.commands.settings import Given, with_settings

KILL = "kill_task"  # no switch: ends one of the store's background tasks, by its name, as a defect would
CLOCK = "clock_step"  # seconds by which the wall clock is ahead of the machine's
FAULTS = ("fail_writes", "fail_reads", "fail_frees", "lie_in_reads", "tear_writes", "delay", "bad_places")
SWITCHES = (CLOCK, *FAULTS)


class Control:
    """Opens the store of a daemon of one domain over switches, and obeys what comes on standard input."""

    async def open_store(self, settings: StoreSettings, observer: Observer) -> Store:
        """See ``server.lifecycle.OpenStore``."""
        self._faults = Faults(OPEN[settings.payloads])
        if settings.payloads == "slab":
            self._faults.inner = self._faults.open_slab
        self._clock = SteppedClock()
        self._store = await Store.open(settings, self._faults.open, observer, self._clock)
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, name="latentkv-faults", daemon=True).start()
        return self._store

    def _listen(self) -> None:
        for line in sys.stdin:
            switches = json.loads(line)
            unknown = switches.keys() - {*SWITCHES, KILL}
            answer = {"unknown": sorted(unknown)} if unknown else self._obey(switches)
            print(json.dumps(answer), flush=True)

    def _obey(self, switches: dict[str, Any]) -> dict[str, Any]:
        task = switches.pop(KILL, None)
        self._clock.step = switches.pop(CLOCK, self._clock.step)
        for name, value in switches.items():
            setattr(self._faults, name, value)
        return asyncio.run_coroutine_threadsafe(self._look(task), self._loop).result()

    async def _look(self, task: str | None) -> dict[str, Any]:
        if task is not None:
            self._store.supervisor.kill(task)
        return {"held": asdict(self._store.held()), "violated": self._store.check()}


@with_settings
def serve(given: Given) -> None:
    """Serve a data directory over a disk that fails on demand, until SIGTERM."""
    with one_line():
        run_daemon(given.load(), Control().open_store)


if __name__ == "__main__":
    typer.run(serve)
