"""The payload protocol: block bytes of one layout (one size class) on disk.

Payload stores know places and bytes, nothing else: which block lies where, its codec
and its checksum stand in the catalogue, which is committed after ``write`` returned and
before ``free`` is called. So after a crash what the catalogue names is whole, and what
it does not name is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

Place = int  # names one payload, 1 or more; never given out twice in the life of a store
ReadableBuffer = bytes | bytearray | memoryview


class Payloads(Protocol):
    """Durable block bytes.

    ``write`` and ``free`` are called by one thread at a time, ``read_into`` by any
    number of threads, also beside them.
    """

    def write(self, items: Sequence[ReadableBuffer]) -> list[Place]:
        """Store each item; returns their places in order, durable (flushed) on return.

        All or nothing: ``DiskError`` (full, failing) leaves nothing stored. The items
        are the caller's again on return; their bytes must not change before.
        """

    def read_into(self, place: Place, length: int, out: memoryview) -> None:
        """Copy the ``length`` bytes stored at ``place`` to the start of ``out`` (writable, contiguous).

        Raises ``CorruptBlock`` when the payload is missing or of another length, and
        ``DiskError`` when it could not be read now; ``out`` may then hold anything.
        Bytes damaged at rest are returned as they are: the caller's checksum decides.
        ``out`` is not kept.
        """

    def free(self, places: Sequence[Place]) -> None:
        """Forget these payloads, durably; their bytes on disk serve the next writes.

        Unknown places are ignored, so a repetition does no harm. The caller makes sure
        that nobody reads them any more. After ``DiskError`` some may be freed: call it again later.
        """

    def places(self) -> Iterator[Place]:
        """Every stored place in rising order, without touching a payload's pages.

        Raises ``DiskError``. Not a snapshot: writes and frees during the iteration may or may not show.
        """

    def stored_bytes(self, length: int) -> int:
        """Bytes that a payload of ``length`` bytes takes on disk, page rounding and headers included."""

    def file_bytes(self) -> int:
        """Bytes that the store's files take on disk now, free space inside them included."""

    def close(self) -> None:
        """Give up the files. No other call may be running or follow; a second ``close`` does nothing."""
