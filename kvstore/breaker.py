"""A circuit breaker: a daemon that does not answer costs one deadline, not one a call.

A call that ran into its deadline opens the circuit. While it is open calls are refused at
once, and a thread asks the daemon for a sign of life; the first closes it. So a false alarm
lasts as long as one answer takes.

A call that may have waited for something else than the daemon (the disk) only casts a doubt: the daemon
is asked first, what is called meanwhile waits for its answer, and without one the circuit opens.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

log = logging.getLogger(__name__)

PROBE_SECONDS = 0.25  # between two questions
DOUBT_SECONDS = 1.0  # that a call waits for what becomes of a doubt, at most


class CircuitBreaker:
    """Open or closed. ``probe`` says whether the daemon answers, and takes not long. Thread-safe."""

    def __init__(self, probe: Callable[[], bool]) -> None:
        self._probe = probe
        self._lock = threading.Lock()  # over what follows
        self._open = False
        self._doubt: threading.Event | None = None  # set once the daemon has answered, or not
        self._counts: Counter[str] = Counter()
        self._closing = threading.Event()

    def refuses(self) -> bool:
        """Whether a call must not be tried now; counted if so. Waits while that is in doubt."""
        doubt = self._doubt
        if doubt is not None:
            doubt.wait(DOUBT_SECONDS)
        if not self._open:
            return False
        with self._lock:
            self._counts["circuit_refused"] += 1
        return True

    def trip(self) -> None:
        """A call got no answer in time: refuse the others until there is a sign of life."""
        if self._begin():
            threading.Thread(target=self._watch, name="latentkv-probe", daemon=True).start()

    def _begin(self) -> bool:
        """Open the circuit. Whether it was closed."""
        with self._lock:
            if self._open or self._closing.is_set():
                return False
            self._open = True
            self._counts["circuit_opened"] += 1
        log.warning("event=circuit_opened reason=a call ran into its deadline")
        return True

    def doubt(self) -> None:
        """A call was not answered in time, for whatever reason: find out whether the daemon lives."""
        with self._lock:
            if self._open or self._doubt is not None or self._closing.is_set():
                return
            self._doubt = doubt = threading.Event()
        threading.Thread(target=self._settle, args=(doubt,), name="latentkv-probe", daemon=True).start()

    def _settle(self, doubt: threading.Event) -> None:
        opened = not self._probe() and self._begin()
        self._doubt = None
        doubt.set()
        if opened:
            self._watch()

    def _watch(self) -> None:
        while not self._closing.is_set():
            if self._probe():
                self._open = False
                log.warning("event=circuit_closed")
                return
            self._closing.wait(PROBE_SECONDS)

    def counters(self) -> dict[str, int]:
        """How often it opened, and how many calls it refused."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """End the watching."""
        self._closing.set()
