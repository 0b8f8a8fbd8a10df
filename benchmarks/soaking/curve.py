"""The anonymous memory of a daemon over a soak: taken all the while, and judged over the last part."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.settings import MIB

SAMPLE_SECONDS = 1.0
# A daemon that is new grows for a while: its threads and the allocator take what they need at most, the more
# of it the more kinds of faults it meets for the first time (up to 16 MiB were seen). So a short curve shows
# no more than whether memory runs away.
SETTLING_BYTES = 32 * MIB
LONG_SECONDS = 180.0
# Behind that it is flat but for peaks, which sway the slope over minutes by half of this. A soak makes
# some fifty tickets a second: whatever remembers more than 300 bytes of each is found.
ALLOWED_RATE = 16 * 1024.0  # bytes a second
POINTS = 120  # that a slope is taken through, at most


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process had at some time (monotonic seconds)."""

    at: float
    pid: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Curve:
    """Of one process. ``slope`` is in bytes a second."""

    seconds: float
    first: int
    last: int
    least: int
    most: int
    slope: float

    @classmethod
    def of(cls, samples: Sequence[Sample], since: float) -> Self:
        """Through what the process that was there last had since then."""
        own = [each for each in samples if each.at >= since and each.pid == samples[-1].pid]
        if not own:
            return cls(0.0, 0, 0, 0, 0, 0.0)
        sizes = [each.nbytes for each in own]
        seconds = own[-1].at - own[0].at
        return cls(seconds, sizes[0], sizes[-1], min(sizes), max(sizes), slope(own))

    @property
    def growth(self) -> float:
        """Bytes by which it went up from its beginning to its end, without peaks."""
        return self.slope * self.seconds

    @property
    def allowed(self) -> float:
        """What it may go up without being called growing."""
        return ALLOWED_RATE * self.seconds if self.seconds >= LONG_SECONDS else SETTLING_BYTES

    @property
    def grows(self) -> bool:
        """Whether it goes up by more than what is allowed."""
        return self.growth > self.allowed

    def __str__(self) -> str:
        return (
            f"{self.first / MIB:.1f} to {self.last / MIB:.1f} MiB in {self.seconds:.0f} s, between"
            f" {self.least / MIB:.1f} and {self.most / MIB:.1f}: {self.slope * 60 / MIB:+.2f} MiB a minute"
        )


def slope(samples: Sequence[Sample]) -> float:
    """Bytes a second: the median of the slopes between all pairs, for which peaks do not count."""
    some = samples[:: len(samples) // POINTS + 1]
    slopes = [(b.nbytes - a.nbytes) / (b.at - a.at) for a, b in itertools.combinations(some, 2)]
    return statistics.median(slopes) if slopes else 0.0


class Watch:
    """Samples of whatever process ``pid`` names, in a thread. Use it as a context."""

    def __init__(self, pid: Callable[[], int], seconds: float = SAMPLE_SECONDS) -> None:
        self.samples: list[Sample] = []
        self._pid = pid
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            pid = self._pid()
            nbytes = anonymous_bytes(pid)
            if nbytes is not None:
                self.samples.append(Sample(time.monotonic(), pid, nbytes))


def anonymous_bytes(pid: int) -> int | None:
    """Resident memory of a process that belongs to no file and is not shared; None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(found[0]) * 1024 if found else None
