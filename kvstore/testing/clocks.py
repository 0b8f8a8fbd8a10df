"""A clock whose wall can be set, as whoever administers a machine may do at any time."""

from __future__ import annotations

from kvstore.clock import Clock


class SteppedClock(Clock):
    """``step`` is how many seconds the wall clock is ahead of the machine's; set it at any time.

    ``passed`` is how many seconds more than really have gone by, on both clocks: time that passes.
    """

    def __init__(self, step: float = 0.0) -> None:
        self.step = step
        self.passed = 0.0

    def wall(self) -> float:
        """See ``Clock.wall``."""
        return super().wall() + self.passed + self.step

    def steady(self) -> float:
        """See ``Clock.steady``."""
        return super().steady() + self.passed
