"""Payloads that fail on demand: a real store with a failing disk underneath."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.disk import OpenPayloads
from kvstore.errors import DiskError
from kvstore.payloads import Payloads, Place, ReadableBuffer
from kvstore.payloads.lmdb import LmdbPayloads


def _open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


@dataclass(eq=False)
class Faults:
    """Switches shared by all payloads of a store; may be flipped from any thread, at any time.

    ``open`` is the ``open_payloads`` of ``Store.open`` and ``Embedded``. While a gate is
    cleared, calls of its kind wait at it: so a test orders events without a clock.
    """

    inner: OpenPayloads = LmdbPayloads
    fail_writes: bool = False
    fail_reads: bool = False
    fail_frees: bool = False
    read_gate: threading.Event = field(default_factory=_open_gate)
    write_gate: threading.Event = field(default_factory=_open_gate)
    reads: int = 0  # begun
    writes: int = 0  # begun

    def open(self, path: Path, map_bytes: int, first_free: Place) -> Payloads:
        """Payloads of ``inner`` behind these switches."""
        return FaultyPayloads(self.inner(path, map_bytes, first_free), self)


class FaultyPayloads:
    """``inner`` behind the switches of ``Faults``: raises ``DiskError`` where they say so."""

    def __init__(self, inner: Payloads, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def write(self, items: Sequence[ReadableBuffer]) -> list[Place]:
        """See ``Payloads.write``."""
        self._faults.writes += 1
        self._faults.write_gate.wait()
        if self._faults.fail_writes:
            raise DiskError("injected: the disk cannot be written")
        return self._inner.write(items)

    def read_into(self, place: Place, length: int, out: memoryview) -> None:
        """See ``Payloads.read_into``."""
        self._faults.reads += 1
        self._faults.read_gate.wait()
        if self._faults.fail_reads:
            raise DiskError("injected: the disk cannot be read")
        self._inner.read_into(place, length, out)

    def free(self, places: Sequence[Place]) -> None:
        """See ``Payloads.free``."""
        if self._faults.fail_frees:
            raise DiskError("injected: nothing can be freed")
        self._inner.free(places)

    def places(self) -> Iterator[Place]:
        """See ``Payloads.places``."""
        return self._inner.places()

    def stored_bytes(self, length: int) -> int:
        """See ``Payloads.stored_bytes``."""
        return self._inner.stored_bytes(length)

    def file_bytes(self) -> int:
        """See ``Payloads.file_bytes``."""
        return self._inner.file_bytes()

    def close(self) -> None:
        """See ``Payloads.close``."""
        self._inner.close()
