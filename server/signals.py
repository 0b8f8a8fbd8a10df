"""What a daemon's process does on signals, from its first moment to its last.

The handlers are Python's own and not the event loop's: those go when the loop is closed, and the next
signal would then kill a process that has only its exit status left to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from types import FrameType
from typing import Self

STOP = (signal.SIGTERM, signal.SIGINT)
AGAIN = signal.SIGHUP
# Of no meaning here; what they would do by default is to kill.
IGNORED = (signal.SIGUSR1, signal.SIGUSR2)


def let_all_pass() -> None:
    """At the very end nothing is left to stop or to read again."""
    for number in (*STOP, AGAIN, *IGNORED):
        signal.signal(number, signal.SIG_IGN)


class Signals:
    """Calls ``stop``, ``read_again`` and ``ignore`` on the running event loop. For the main thread only."""

    def __init__(
        self,
        stop: Callable[[signal.Signals], None],
        read_again: Callable[[], None],
        ignore: Callable[[signal.Signals], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        self._read_again = read_again
        self._ignore = ignore

    def catch(self) -> Self:
        """Catch them from now on, for the life of the process."""
        for number in (*STOP, AGAIN, *IGNORED):
            signal.signal(number, self._came)
        return self

    def _came(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: all is done
            self._loop.call_soon_threadsafe(self._act, signal.Signals(number))

    def _act(self, number: signal.Signals) -> None:
        if number in STOP:
            self._stop(number)
        elif number == AGAIN:
            self._read_again()
        else:
            self._ignore(number)
