"""A worker of a soak, in a process of its own: ``python -m benchmarks.soaking.worker URL SEED TOKEN_FILE``.

Tells what happens on its standard output and takes orders on its standard input, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import sys
import threading
import time

import kvstore
from benchmarks.soaking.children import fork
from benchmarks.soaking.requests import CALL_SECONDS, Clock, Orders, Requester, details
from kvstore.errors import KVStoreError
from kvstore.identity import Identity

THREADS = 2
THINK_SECONDS = 0.06  # between two requests of a thread, on average


class Gang:
    """The threads of a worker, which can be paused between two requests."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._paused = False
        self._ended = False
        self._idle = 0

    def go_on(self) -> bool:
        """Called between two requests: wait while paused. False if there shall be no more."""
        with self._news:
            self._idle += 1
            self._news.notify_all()
            self._news.wait_for(lambda: not self._paused or self._ended)
            self._idle -= 1
            return not self._ended

    def pause(self) -> None:
        """Wait until no thread has a request under way."""
        with self._news:
            self._paused = True
            self._news.wait_for(lambda: self._idle == THREADS)

    def resume(self, *, end: bool = False) -> None:
        """Let them go on, or end."""
        with self._news:
            self._paused, self._ended = False, end
            self._news.notify_all()


class Teller:
    """Writes events, a line each. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, event: str, **more: object) -> None:
        """See ``requests.Tell``."""
        line = json.dumps(details(event=event, **more))
        with self._lock:
            try:
                print(line, flush=True)
            except BrokenPipeError:  # nobody listens any more
                os._exit(1)


def _session(requester: Requester, gang: Gang) -> None:
    while gang.go_on():
        requester.request(*requester.choose())
        time.sleep(requester.rng.expovariate(1 / THINK_SECONDS))


def _meet(
    url: str, identity: Identity, who: int, seed: int, tell: Teller, clock: Clock, orders: Orders
) -> Requester:
    """A requester over a client, as soon as the daemon answers."""
    client = kvstore.connect(url, timeout=CALL_SECONDS, identity=identity)
    while True:
        with contextlib.suppress(KVStoreError):
            return Requester(client, who, random.Random(seed * THREADS + who), tell, clock, orders)
        time.sleep(0.1)


def main(url: str, seed: int, token_file: str = "") -> None:
    """Work until told to end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    identity = Identity.from_files(token_file)
    tell, gang, orders = Teller(), Gang(), Orders()
    clock = Clock(tell)
    team = [_meet(url, identity, who, seed, tell, clock, orders) for who in range(THREADS)]
    threads = [threading.Thread(target=_session, args=(each, gang)) for each in team]
    for thread in threads:
        thread.start()
    threading.Thread(target=_watch, args=(clock,), daemon=True).start()
    tell("ready")
    _obey(gang, orders, team[0])
    gang.resume(end=True)
    for thread in threads:
        thread.join()
    for each in team:
        each.store.close()
    tell("ended")


def _watch(clock: Clock) -> None:
    while True:
        clock.look()
        time.sleep(1.0)


def _obey(gang: Gang, orders: Orders, requester: Requester) -> None:
    """Carry out what comes on standard input, until it ends or says so."""
    for line in sys.stdin:
        order = json.loads(line)
        match order["do"]:
            case "pause":
                gang.pause()
                gc.collect()  # what was dropped
                requester.tell("paused")
            case "go":
                gang.resume()
            case "hold":
                orders.hold = order["seconds"]
            case "squat":
                orders.squat = order["seconds"]
            case "drop":
                orders.drop = order["seconds"]
            case "fork":
                requester.tell("forked", returned=fork(requester, order["seconds"]))
            case _:
                return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
