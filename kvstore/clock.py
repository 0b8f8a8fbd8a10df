"""The time by which a store lives: it goes on evenly, whatever is done to the machine's wall clock.

Life and order (time to live, pins, which block was used last) are counted in the store's own time.
That starts as unix seconds and goes on with the machine's steady clock, so that a wall clock that is
set back or forward neither drops what is in use nor keeps what is not. A step of the wall clock is
noticed by comparing the two, logged and counted; how far both are apart by now, the skew, is noted
in the catalogue, whose times are the store's. People are shown wall times.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections import Counter

from kvstore.catalog import Catalog

log = logging.getLogger(__name__)

STEP_SECONDS = 1.0  # by which the clocks part at once when one is set; less is jitter
WATCH_SECONDS = 1.0  # between two looks at them
LATEST = float((1 << 32) - 1)  # the last second that a block's record in memory can tell
_NOTES, _NAME, _SKEW = b"clock/", b"skew", struct.Struct("<d")


class Clock:
    """The machine's clocks. Tests and soaks pass one whose wall can be set (``kvstore.testing.clocks``)."""

    def wall(self) -> float:
        """Unix seconds, as whoever administers the machine has set them."""
        return time.time()

    def steady(self) -> float:
        """Seconds since some moment, with those that the machine slept; nobody sets them."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class StoreTime:
    """A store's own time, in unix seconds as far as the wall clock was right. It never goes back."""

    def __init__(self, clock: Clock, counters: Counter[str]) -> None:
        self._clock = clock
        self._counters = counters
        self._apart = clock.wall() - clock.steady()  # at the last look
        self._skew = 0.0  # the store's time less the wall's
        self._last = 0.0
        self._noted = 0.0

    def restore(self, catalog: Catalog, latest: float) -> None:
        """Go on where the store was left; ``latest`` is the latest time in its records. Raises ``DiskError``.

        Time that passed while the store was closed counts, as the wall clock tells it, and goes back in
        no case. Where a step leaves a doubt, what is kept is kept rather longer.
        """
        found = [body for key, body in catalog.notes(_NOTES) if key == _NAME]
        if found and found[0] is not None and len(found[0]) == _SKEW.size:
            self._noted = _SKEW.unpack(found[0])[0]
        wall = self._clock.wall()
        self._apart = wall - self._clock.steady()
        self._skew = min(self._noted, 0.0) if math.isfinite(self._noted) else 0.0
        if latest > wall + self._skew + STEP_SECONDS:
            ahead, self._skew = latest - wall - self._skew, latest - wall
            self._counters["clock_steps"] += 1
            log.warning("event=clock_step seconds=%.1f while=closed", -ahead)
        self._last = min(latest, LATEST)

    def now(self) -> float:
        """Unix seconds of the store; at least those that were told before."""
        even = self._clock.steady() + self._apart + self._skew
        self._last = min(max(even, self._last), LATEST)
        return self._last

    def look(self) -> None:
        """Notice whether the wall clock was set since the last look."""
        apart = self._clock.wall() - self._clock.steady()
        step = apart - self._apart
        if abs(step) < STEP_SECONDS:
            return
        self._apart, self._skew = apart, self._skew - step
        self._counters["clock_steps"] += 1
        log.warning("event=clock_step seconds=%.1f", step)

    def of_wall(self, at: float) -> float:
        """The store's time when the wall clock shows ``at``."""
        self.look()
        return at + self._skew

    def to_wall(self, at: float) -> float:
        """What the wall clock showed at a moment of the store's time, had it been then as it is now."""
        self.look()
        return at - self._skew

    def due(self) -> dict[bytes, bytes]:
        """The note that has to be written, since a step was noticed; empty if there is none."""
        self.look()
        return {_NOTES + _NAME: _SKEW.pack(self._skew)} if self._skew != self._noted else {}

    def wrote(self, notes: dict[bytes, bytes]) -> None:
        """What ``due`` gave is on disk."""
        self._noted = _SKEW.unpack(notes[_NOTES + _NAME])[0]
