"""The last hour: totals sampled at even steps, for the plots of the status page."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from server.tally import Tally

STEP_SECONDS = 10.0
SAMPLES = 360


@dataclass(frozen=True, slots=True)
class Sample:
    """Totals since the daemon's start. ``at`` in unix seconds."""

    at: float
    matches: int
    matched_tokens: int
    hit_tokens: int
    short_tokens: int
    miss_tokens: int
    loaded_bytes: int
    written_bytes: int


class History:
    """A ring of samples, oldest first."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._samples: deque[Sample] = deque(maxlen=SAMPLES + 1)

    def sample(self, at: float) -> Sample:
        """The totals now."""
        tenants = list(self._tally.tenants.values())
        return Sample(
            at,
            matches=sum(each.matches.total() for each in tenants),
            matched_tokens=sum(each.matched_tokens.total() for each in tenants),
            hit_tokens=sum(each.hit_tokens.total() for each in tenants),
            short_tokens=sum(each.short_tokens for each in tenants),
            miss_tokens=sum(each.miss_tokens.total() for each in tenants),
            loaded_bytes=self._tally.loaded_bytes,
            written_bytes=self._tally.step_bytes("disk_write"),
        )

    def keep(self, at: float) -> None:
        """Take a sample; the oldest leaves when there are too many."""
        self._samples.append(self.sample(at))

    def samples(self) -> list[Sample]:
        """What was kept."""
        return list(self._samples)
