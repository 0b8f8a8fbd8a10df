"""The last warnings and errors of the daemon's log, for whoever looks at its status."""

from __future__ import annotations

import logging
import re
from collections import deque
from dataclasses import dataclass

KEPT_FAULTS = 50
_EVENT = re.compile(r"event=(\w+) ?")


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the log. ``at`` in unix seconds."""

    at: float
    level: str
    event: str
    details: str


class FaultLog(logging.Handler):
    """Keeps the last lines from ``WARNING`` on. Lines come from any thread."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._faults: deque[Fault] = deque(maxlen=KEPT_FAULTS)

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        text = record.getMessage()
        found = _EVENT.match(text)
        name = found.group(1) if found else record.name
        details = text[found.end() :] if found else text
        self._faults.append(Fault(record.created, record.levelname.lower(), name, details))

    def recent(self) -> list[Fault]:
        """The latest first."""
        return list(self._faults)[::-1]
