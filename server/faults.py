"""The last warnings and errors of the daemon's log, for whoever looks at its status."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from dataclasses import dataclass

KEPT_FAULTS = 50
KEPT_OF_ONE_EVENT = 10  # so that a fault that comes often does not push all others out
_EVENT = re.compile(r"event=(\w+) ?")


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the log. ``at`` in unix seconds."""

    at: float
    level: str
    event: str
    details: str


class FaultLog(logging.Handler):
    """Keeps the last lines from ``WARNING`` on, some of each event. Lines come from any thread."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._faults: list[Fault] = []  # the oldest first
        self._keeping = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        text = record.getMessage()
        found = _EVENT.match(text)
        name = found.group(1) if found else record.name
        details = text[found.end() :] if found else text
        fault = Fault(record.created, record.levelname.lower(), name, details)
        with self._keeping:
            self._faults.append(fault)
            if Counter(each.event for each in self._faults)[name] > KEPT_OF_ONE_EVENT:
                self._faults.remove(next(each for each in self._faults if each.event == name))
            del self._faults[:-KEPT_FAULTS]

    def recent(self) -> list[Fault]:
        """The latest first."""
        with self._keeping:
            return self._faults[::-1]
