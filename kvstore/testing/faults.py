"""Payloads that fail on demand: a real store with a failing disk underneath."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.errors import DiskError
from kvstore.payloads import Keys, OpenPayloads, Payloads, Place
from kvstore.payloads.direct import Run
from kvstore.payloads.kinds import open_lmdb


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

    inner: OpenPayloads = open_lmdb
    fail_writes: bool = False
    fail_reads: bool = False
    fail_frees: bool = False
    read_gate: threading.Event = field(default_factory=_open_gate)
    write_gate: threading.Event = field(default_factory=_open_gate)
    reads: int = 0  # begun
    writes: int = 0  # begun

    def open(self, path: Path, map_bytes: int, block_bytes: int, first_free: int) -> Payloads:
        """Payloads of ``inner`` behind these switches."""
        return FaultyPayloads(self.inner(path, map_bytes, block_bytes, first_free), self)


class FaultyPayloads:
    """``inner`` behind the switches of ``Faults``: raises ``DiskError`` where they say so."""

    def __init__(self, inner: Payloads, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self.lead = inner.lead

    def write(self, items: Sequence[Run]) -> list[Place]:
        """See ``Payloads.write``."""
        self._faults.writes += 1
        self._faults.write_gate.wait()
        if self._faults.fail_writes:
            raise DiskError("injected: the disk cannot be written")
        return self._inner.write(items)

    def read_into(self, place: Place, run: Run) -> None:
        """See ``Payloads.read_into``."""
        self._faults.reads += 1
        self._faults.read_gate.wait()
        if self._faults.fail_reads:
            raise DiskError("injected: the disk cannot be read")
        self._inner.read_into(place, run)

    def free(self, keys: Sequence[int]) -> None:
        """See ``Payloads.free``."""
        if self._faults.fail_frees:
            raise DiskError("injected: nothing can be freed")
        self._inner.free(keys)

    def retain(self, named: Keys) -> set[int]:
        """See ``Payloads.retain``."""
        return self._inner.retain(named)

    def missing(self, keys: Keys) -> set[int]:
        """See ``Payloads.missing``."""
        return self._inner.missing(keys)

    def stored_bytes(self, length: int) -> int:
        """See ``Payloads.stored_bytes``."""
        return self._inner.stored_bytes(length)

    def file_bytes(self) -> int:
        """See ``Payloads.file_bytes``."""
        return self._inner.file_bytes()

    def close(self) -> None:
        """See ``Payloads.close``."""
        self._inner.close()
