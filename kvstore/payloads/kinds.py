"""The kinds of payload store that a data directory may have."""

from __future__ import annotations

from pathlib import Path

from kvstore.payloads import OpenPayloads, Payloads
from kvstore.payloads.lmdb import LmdbPayloads
from kvstore.payloads.slab import SlabPayloads
from kvstore.settings import PayloadKind


def open_lmdb(path: Path, limit_bytes: int, block_bytes: int, first_free: int) -> Payloads:
    """``OpenPayloads`` of the kind ``lmdb``, which takes payloads of any size."""
    return LmdbPayloads(path, limit_bytes, first_free)


def open_slab(path: Path, limit_bytes: int, block_bytes: int, first_free: int) -> Payloads:
    """``OpenPayloads`` of the kind ``slab``, whose keys are slots and so are given out again."""
    return SlabPayloads(path, limit_bytes, block_bytes)


OPEN: dict[PayloadKind, OpenPayloads] = {"lmdb": open_lmdb, "slab": open_slab}
LEAD: dict[PayloadKind, int] = {"lmdb": LmdbPayloads.lead, "slab": SlabPayloads.lead}
