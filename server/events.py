"""One structured log line per event: ``event=name key=value ...``.

What a peer can make happen as often as it likes is logged some times a minute, and counted beyond.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

from kvstore.showing import field

LINES = 10  # of one kind in ``SECONDS``
SECONDS = 60.0


def event(logger: logging.Logger, level: int, name: str, **fields: object) -> None:
    """Log an event. Values with spaces, quotes or what is not seen as itself are written as JSON strings."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", " ".join([f"event={name}", *(f"{k}={field(v)}" for k, v in fields.items())]))


class Occasional:
    """Logs events that peers cause, ``LINES`` of a kind in ``SECONDS``. Thread-safe.

    The first line after a silence says how many were left out. There must be few kinds: they are remembered.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._log = logger
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._seen: Counter[str] = Counter()  # of each kind since then
        self._left_out: Counter[str] = Counter()

    def event(self, level: int, name: str, kind: str = "", **fields: object) -> None:
        """Log an event, unless there were enough of its kind (of its name, if it has no other)."""
        kind = kind or name
        if not self._log.isEnabledFor(level):
            return
        with self._lock:
            now = time.monotonic()
            if now - self._since > SECONDS:
                self._since = now
                self._seen.clear()
            self._seen[kind] += 1
            if self._seen[kind] > LINES:
                self._left_out[kind] += 1
                return
            left_out = self._left_out.pop(kind, 0)
        more = {"left_out": left_out} if left_out else {}
        last = {"further": f"left out for {SECONDS:g} s"} if self._seen[kind] == LINES else {}
        event(self._log, level, name, **fields, **more, **last)
