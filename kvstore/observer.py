"""What a store tells whoever watches it: metrics know the store, the store knows no metrics.

An observer must neither wait nor raise. ``read`` and ``wrote`` come from the threads that
move bytes, the rest from the store's event loop.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class Departure(StrEnum):
    """Why a block left the store."""

    CAPACITY = "capacity"  # evicted, for the disk was full
    EXPIRED = "expired"  # not used for too long, or stored too long ago
    DELETED = "deleted"  # by an operator
    CORRUPT = "corrupt"  # its payload did not verify
    LOST = "lost"  # its payload was no longer there


class Observer(Protocol):
    """Hears of what happens behind the verbs. Times in seconds, sizes in bytes."""

    def read(self, nbytes: int, seconds: float) -> None:
        """A stored payload was read from disk, decoded and verified."""

    def wrote(self, nbytes: int, seconds: float) -> None:
        """A batch of payloads became durable."""

    def block_left(self, why: Departure, idle_seconds: float) -> None:
        """A block left the store that was last used so long ago."""

    def unit_left(self, why: Departure, age_seconds: float, hits: int) -> None:
        """A unit went with its last block, so long after it was made and hit so often."""


class Unobserved:
    """Nobody watches."""

    def read(self, nbytes: int, seconds: float) -> None:
        """See ``Observer``."""

    def wrote(self, nbytes: int, seconds: float) -> None:
        """See ``Observer``."""

    def block_left(self, why: Departure, idle_seconds: float) -> None:
        """See ``Observer``."""

    def unit_left(self, why: Departure, age_seconds: float, hits: int) -> None:
        """See ``Observer``."""
