"""What an object leaves behind when its owner drops it without closing it: threads, leases, slots."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable


def end_when_dropped(
    owner: object, end: Callable[[], None]
) -> weakref.finalize[[int, Callable[[], None]], object]:
    """Have ``end`` run in a thread of its own once nobody refers to ``owner``.

    ``end`` must not refer to ``owner``. In a thread, for the garbage collector interrupts whoever is at
    work, and may hold any lock. Not in a forked child, whose parent goes on with all of it, and not at
    the end of the process, which ends it all anyway. Whoever ends it by hand calls ``detach`` of what
    this returns: only one of them gets something other than None, and does it.
    """
    ending = weakref.finalize(owner, _end_aside, os.getpid(), end)
    ending.atexit = False
    return ending


def _end_aside(process: int, end: Callable[[], None]) -> None:
    if os.getpid() == process:
        with contextlib.suppress(RuntimeError):  # no thread can be started any more: the process ends
            threading.Thread(target=end, name="latentkv-end", daemon=True).start()
