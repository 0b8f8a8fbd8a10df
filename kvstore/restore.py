"""Building the index from the catalogue at start, in arrays: a store may have millions of blocks."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from kvstore.catalog import Catalog
from kvstore.disk import DiskTier, Freed
from kvstore.hashing import HASH_BYTES
from kvstore.prefix_index import NONE, BlockState, PrefixIndex, UnitUse, view
from kvstore.spaces import SpaceTable

log = logging.getLogger(__name__)


def restore(index: PrefixIndex, disk: DiskTier, spaces: SpaceTable, counters: Counter[str]) -> Counter[int]:
    """Fill an empty index from the catalogue; returns the payload bytes in use by namespace.

    Payloads that no record names are freed; records whose payload is gone are dropped.
    Raises ``DiskError``.
    """
    holding = _fill(index, disk.catalog, spaces)
    disk.drop_namespaces(spaces.forget_closed(holding), {})
    disk.sweep(spaces.known_sizes)
    for size, ids in spaces.by_size().items():
        rows = np.flatnonzero(np.isin(view(index.namespace), ids) & (view(index.place) != NONE))
        places = view(index.place)[rows]
        gone = disk.reclaim(size, places)
        if gone:
            _drop_lost(index, disk, size, rows[np.isin(places, list(gone))])
        counters["lost_payloads"] += len(gone)
    _restore_units(index, disk)
    _age_like_children(index)
    counters["catalog_skipped"] = disk.catalog.skipped
    used = used_bytes(index, disk, spaces)
    _trim_heap()
    return used


def used_bytes(index: PrefixIndex, disk: DiskTier, spaces: SpaceTable) -> Counter[int]:
    """Bytes on disk of all indexed payloads, by id of the namespace, counted anew."""
    stored = view(index.place) != NONE
    # One number for both, for numpy counts equal numbers much faster than equal pairs.
    pairs = view(index.namespace)[stored].astype(np.int64) << 32 | view(index.length)[stored]
    found, counts = np.unique(pairs, return_counts=True)
    used: Counter[int] = Counter()
    for pair, count in zip(found.tolist(), counts.tolist(), strict=True):
        number = pair >> 32
        used[number] += count * disk.stored_bytes(spaces.of(number).block_bytes, pair & 0xFFFFFFFF)
    return used


def _fill(index: PrefixIndex, catalog: Catalog, spaces: SpaceTable) -> set[int]:
    """Returns the ids of all namespaces of which there are blocks."""
    holding = set[int]()
    opened = [number for ids in spaces.by_size().values() for number in ids]
    parents = bytearray()
    for chunk in catalog.blocks():
        holding.update(np.unique(chunk["namespace"]).tolist())
        records = chunk[np.isin(chunk["namespace"], opened)]
        index.extend(records)
        parents += records["parent"].tobytes()
    # Records come by hash: a parent may be in the last chunk, so only now the chains can be tied.
    index.link(np.frombuffer(parents, f"V{HASH_BYTES}"))
    return holding


def _trim_heap() -> None:
    """Give the kernel back what building took, a third of what it built; the C heap would keep it."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _drop_lost(index: PrefixIndex, disk: DiskTier, size: int, rows: NDArray[np.int64]) -> None:
    log.error("event=payloads_lost count=%d block_bytes=%d", len(rows), size)
    lost = [(row, Freed(index.hashes[row], size, index.place[row])) for row in rows.tolist()]
    for row, _ in lost:
        index.lose(row)
    disk.drop([freed for _, freed in lost])


def _restore_units(index: PrefixIndex, disk: DiskTier) -> None:
    stale: list[bytes] = []
    for unit in disk.catalog.units():
        row = index.find(unit.hash)
        if row == NONE or index.state[row] != BlockState.PRESENT:
            stale.append(unit.hash)
            continue
        index.kinds[row] = unit.kinds
        index.units[row] = UnitUse(unit.created, unit.used, unit.hits)
        index.used[row] = max(index.used[row], unit.used)
    if stale:
        disk.catalog.commit(drop_units=stale)


def _age_like_children(index: PrefixIndex) -> None:
    """Blocks are recorded as used when they were written; they were in use as long as what stands on them."""
    used, parent, depth = view(index.used), view(index.parent), view(index.depth)
    rows = np.flatnonzero(parent != NONE)
    rows = rows[np.argsort(-depth[rows], kind="stable")]
    # A block is one deeper than its parent, so a level's parents are all in the next one.
    for level in np.split(rows, np.flatnonzero(np.diff(depth[rows])) + 1):
        np.maximum.at(used, parent[level], used[level])
