"""Children that a worker of a soak forks: each tries to use its parent's client, and lives on."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import NoReturn

from benchmarks.soaking.requests import CALL_SECONDS, Requester
from kvstore.errors import KVStoreError

PARENTS_THREAD = -1  # which waits for the child; as a clock names it
HANG_SECONDS = 60  # after which a child that has not come back is given up


def fork(requester: Requester, seconds: float) -> bool:
    """Fork a child that lives on for so long. False if it did not live to come back from the store.

    How the store answers it is all the same, but it does at once.
    """
    news, told = os.pipe()
    if os.fork() == 0:
        _live(requester, seconds, told)
    os.close(told)
    with open(news, "rb", buffering=0) as pipe:
        with requester.clock.call(PARENTS_THREAD, "calls of a forked child", CALL_SECONDS):
            came, _, _ = select.select([pipe], [], [], HANG_SECONDS)
        return not came or pipe.read(1) == b"."  # one that hangs is late, which the clock tells


def _live(requester: Requester, seconds: float, told: int) -> NoReturn:
    """Use the store, and stay for so long, or until the parent's orders have ended for good."""
    try:
        signal.alarm(HANG_SECONDS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the parent's end is told by the end of this pipe
        with contextlib.suppress(KVStoreError):
            requester.load(0, 0, requester.hashes(0, 0))
        with contextlib.suppress(KVStoreError):
            requester.store.status()
        requester.store.close()
        os.write(told, b".")
        os.close(told)
        signal.alarm(0)
        orders = select.poll()
        orders.register(0, 0)  # its end, and nothing that comes
        orders.poll(1000 * seconds)
    finally:
        os._exit(0)
