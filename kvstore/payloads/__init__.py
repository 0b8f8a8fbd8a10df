"""The payload protocol: block bytes of one layout (one size class) on disk.

Payload stores know places and bytes, nothing else: which block lies where, its codec
and its checksum stand in the catalogue, which is committed after ``write`` returned and
before ``free`` is called. So after a crash what the catalogue names is whole, and what
it does not name is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.payloads.direct import Run

Keys: TypeAlias = NDArray[np.int64] | Sequence[int]  # of payloads; at start a million, so in an array


class Place(NamedTuple):
    """Where a payload lies."""

    key: int  # names it
    page: int = 0  # the page of its file that it starts in, for stores that read by it; 0 is unknown


class SetAside(NamedTuple):
    """What is used no more until the next start, for it could not be written, read or opened."""

    places: int = 0
    files: int = 0
    nbytes: int = 0  # of disk that all of it takes


class Payloads(Protocol):
    """Durable block bytes.

    Any thread may call, also several at a time; ``retain`` and ``close`` are called beside nothing else.
    """

    lead: int
    """Bytes before a payload in its first page; slots of the arena leave the same, for direct reads."""

    def write(self, items: Sequence[Run]) -> list[Place]:
        """Store each item's payload; returns their places in order, durable (flushed) on return.

        All or nothing: ``DiskError`` (full, failing) leaves nothing stored. The items
        are the caller's again on return; their payloads must not change before.
        """

    def read_into(self, place: Place, run: Run) -> None:
        """Fill ``run.payload`` with the ``run.length`` bytes stored at ``place``.

        Raises ``CorruptBlock`` when the payload is found to be missing or of another length,
        ``BadPlace`` when it can't be read though others can,
        and ``DiskError`` when it could not be read now; the run's pages may then hold anything.
        What is not the payload may be returned (damaged at rest, a wrong page): the caller's
        checksum decides. With ``page=0`` the slower way is taken that needs no page number.
        """

    def free(self, keys: Sequence[int]) -> None:
        """Forget these payloads, durably; their bytes on disk serve the next writes.

        Unknown keys are ignored, so a repetition does no harm. The caller makes sure
        that nobody reads them any more. Raises ``DiskError``; then call it again later.
        """

    def retain(self, named: Keys) -> set[int]:
        """Free all payloads but these; returns those of them that are not there.

        Called once, before anything else; touches no payload's pages. Raises ``DiskError``.
        """

    def missing(self, keys: Keys) -> set[int]:
        """Those of these payloads that are not there; touches no payload's pages. Raises ``DiskError``."""

    def stored_bytes(self, length: int) -> int:
        """Bytes that a payload of ``length`` bytes takes on disk, page rounding and headers included."""

    def set_aside(self) -> SetAside:
        """What of the disk turned out bad in this run."""

    def file_bytes(self) -> int:
        """Bytes that the store's files take on disk now, free space inside them included."""

    def close(self) -> None:
        """Give up the files. No other call may be running or follow; a second ``close`` does nothing."""


OpenPayloads = Callable[[Path, int, int, int], Payloads]
"""Opens the payloads of a directory: (directory, bytes at most, block bytes, first key to give out)."""
