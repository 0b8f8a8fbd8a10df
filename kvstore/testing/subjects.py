"""What the suites for whole stores work on: a store that can be ended and brought back, and looked into."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from kvstore.api import KVStore
from kvstore.embedded import Embedded
from kvstore.payloads import OpenPayloads
from kvstore.settings import MIB, PayloadKind, StoreSettings

HOST_BYTES = MIB  # 85 blocks of ``chains.SMALL``: fewer than some chains have
DISK_BYTES = 64 * MIB


class Subject(Protocol):
    """One store under test, whatever stands behind it. ``store`` is another one after a restart.

    It is small: ``HOST_BYTES`` and by default ``DISK_BYTES``, no intervals, leases that outlive a
    test. Its data directory is ``data`` in the directory that it was given.
    """

    store: KVStore

    def restart(self) -> None:
        """End it cleanly and bring it back on the same data. Nobody may be using it."""

    def delete(self, unit: bytes) -> None:
        """Delete the unit of this name. Raises ``UnitUnknown``."""

    def expire(self) -> None:
        """Let all expire that nothing holds, if its clock can be set forward."""

    def faults(self) -> list[str]:
        """Violated invariants, as far as they can be seen while it runs; empty when sound."""

    def close(self) -> list[str]:
        """End it for good. Violated invariants of what it leaves; empty when sound."""


class EmbeddedSubject:
    """An embedded store as a ``Subject``."""

    def __init__(
        self,
        path: Path,
        payloads: PayloadKind = "lmdb",
        open_payloads: OpenPayloads | None = None,
        *,
        disk_bytes: int = DISK_BYTES,
    ) -> None:
        self._settings = StoreSettings(
            path / "data",
            host_bytes=HOST_BYTES,
            disk_bytes=disk_bytes,
            interval=0,
            payloads=payloads,
            lease_seconds=3600.0,
            drain_seconds=10.0,
        )
        self._open_payloads = open_payloads
        self.store: Embedded = Embedded(self._settings, open_payloads)

    def restart(self) -> None:
        """See ``Subject.restart``."""
        self.store.close()
        self.store = Embedded(self._settings, self._open_payloads)

    def delete(self, unit: bytes) -> None:
        """See ``Subject.delete``."""
        self.store.curate(lambda curator: curator.delete_unit(unit.hex()))

    def expire(self) -> None:
        """See ``Subject.expire``."""
        self.store.expire(time.time() + 2 * self._settings.ttl_seconds)

    def faults(self) -> list[str]:
        """See ``Subject.faults``."""
        return self.store.check()

    def close(self) -> list[str]:
        """See ``Subject.close``."""
        self.store.close()
        return []
