"""Epochs of namespaces: how a worker learns that something it may keep was deleted.

An epoch moves with every deletion in its namespace and is on disk before anything of the
deletion is seen. While all of a namespace is being erased a note says so; a store that is
killed meanwhile goes on with it at its next start.
"""

from __future__ import annotations

import logging
import secrets
import struct
from collections.abc import Collection, Mapping

import numpy as np

from kvstore.catalog import EPOCH, Catalog, epoch_key
from kvstore.errors import EpochPassed

log = logging.getLogger(__name__)

_EPOCH, _ERASING, _REOPENED = b"epoch/", b"erasing/", b"epochs/"
_ID = struct.Struct("<I")
_DROPPED_A_TXN = 4096
_FRESH_BITS = 62  # of an epoch that must differ from all that any worker remembers


class Epochs:
    """The epoch of each namespace by its id, and which are being erased. Owned by the store's loop."""

    def __init__(self) -> None:
        self._epochs: dict[int, int] = {}
        self._given: dict[int, int] = {}  # the last that was given out, perhaps not yet on disk
        self.erasing: set[int] = set()
        self._reopened = False  # a namespace may come back of which something was deleted

    def of(self, number: int) -> int:
        """The epoch of a namespace; 0 if nothing of it was ever deleted."""
        return self._epochs.get(number, 0)

    def require(self, number: int, epoch: int | None) -> None:
        """Raises ``EpochPassed`` unless this is the epoch, or None for a caller who does not know."""
        if epoch is not None and epoch != self.of(number):
            raise EpochPassed(
                f"these blocks were made in epoch {epoch} of their namespace, which is {self.of(number)} now:"
                " something was deleted meanwhile; match again"
            )

    def next(self, number: int) -> tuple[int, Mapping[bytes, bytes]]:
        """The epoch to come, and the note to be on disk before ``move``."""
        epoch = self._given[number] = 1 + max(self._given.get(number, 0), self.of(number))
        return epoch, {epoch_key(number): EPOCH.pack(epoch)}

    def move(self, number: int, epoch: int) -> None:
        """What was made before belongs to the past."""
        self._epochs[number] = max(epoch, self.of(number))

    def first(self) -> int:
        """The epoch of a namespace that is new here; perhaps it was here before, and was retired.

        Then a worker may remember an epoch of it, which this one must not be.
        """
        return 1 + secrets.randbits(_FRESH_BITS) if self._reopened else 0

    def retirement(self, numbers: Collection[int]) -> Mapping[bytes, bytes]:
        """The note to be on disk when these namespaces are forgotten."""
        self._reopened = self._reopened or any(map(self.of, numbers))
        return {_REOPENED + b"reopened": b""} if self._reopened else {}

    def forget(self, number: int) -> None:
        """The namespace is retired, on disk too."""
        self._epochs.pop(number, None)
        self._given.pop(number, None)

    def restore(self, catalog: Catalog) -> None:
        """Read the notes, and finish the erasures that were cut short. Raises ``DiskError``."""
        for key, body in catalog.notes(_EPOCH):
            if len(key) == _ID.size:
                # Of a damaged one no more is known than that it must differ from what workers remember.
                epoch = EPOCH.unpack(body)[0] if body is not None else secrets.randbits(_FRESH_BITS)
                self._epochs[_ID.unpack(key)[0]] = epoch
        self._reopened = any(True for _ in catalog.notes(_REOPENED))
        erasing = [key for key, _ in catalog.notes(_ERASING)]
        if erasing:
            _erase(catalog, [_ID.unpack(key)[0] for key in erasing if len(key) == _ID.size])
            catalog.commit(drop_notes=[_ERASING + key for key in erasing])


def erasing_note(number: int) -> bytes:
    """The key of the note that a namespace is being erased."""
    return _ERASING + _ID.pack(number)


def _erase(catalog: Catalog, numbers: list[int]) -> None:
    """Forget all blocks and units of these namespaces; their payloads are free then, for none names them."""
    blocks = [
        block
        for chunk in catalog.blocks()
        for block in chunk["hash"][np.isin(chunk["namespace"], numbers)].tolist()
    ]
    units = [unit.hash for unit in catalog.units() if unit.namespace in numbers]
    for start in range(0, max(len(blocks), len(units)), _DROPPED_A_TXN):
        part = slice(start, start + _DROPPED_A_TXN)
        catalog.commit(drop_blocks=blocks[part], drop_units=units[part])
    log.warning("event=erasure_finished namespaces=%d blocks=%d", len(numbers), len(blocks))
