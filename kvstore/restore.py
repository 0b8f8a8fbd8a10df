"""Building the index from the catalogue at start."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict

import numpy as np

from kvstore.catalog import BlockRecord
from kvstore.disk import DiskTier, Freed
from kvstore.hashing import ROOT
from kvstore.prefix_index import NONE, BlockState, PrefixIndex, UnitUse
from kvstore.spaces import SpaceTable

log = logging.getLogger(__name__)


def restore(index: PrefixIndex, disk: DiskTier, spaces: SpaceTable, counters: Counter[str]) -> int:
    """Fill an empty index from the catalogue; returns the payload bytes in use.

    Payloads that no record names are freed; records whose payload is gone are dropped.
    Raises ``DiskError``.
    """
    named: defaultdict[int, dict[int, bytes]] = defaultdict(dict)  # block bytes -> place -> hash
    for record in disk.catalog.blocks():
        space = spaces.by_id(record.namespace)
        if space is not None:
            named[space.block_bytes][record.place] = record.hash
            _add(index, record)
    disk.sweep(spaces.known_sizes)
    for size in spaces.block_sizes():
        gone = disk.reclaim(size, named[size])
        _drop_lost(index, disk, size, {place: named[size][place] for place in gone})
        counters["lost_payloads"] += len(gone)
    _restore_units(index, disk)
    _age_like_children(index)
    counters["catalog_skipped"] = disk.catalog.skipped
    return used_bytes(index, disk, spaces)


def used_bytes(index: PrefixIndex, disk: DiskTier, spaces: SpaceTable) -> int:
    """Bytes on disk of all indexed payloads, counted anew."""
    lengths = Counter((index.namespace[row], index.length[row]) for row in index if index.place[row] != NONE)
    return sum(
        count * disk.stored_bytes(spaces.of(namespace).block_bytes, length)
        for (namespace, length), count in lengths.items()
    )


def _add(index: PrefixIndex, record: BlockRecord) -> None:
    parent = NONE
    if record.parent != ROOT:
        parent = index.find(record.parent)
        if parent == NONE:  # comes later, or was lost: a hole until then
            parent = index.add(record.parent, NONE, record.namespace, record.depth - 1, record.used)
    row = index.find(record.hash)
    if row == NONE:
        row = index.add(record.hash, parent, record.namespace, record.depth, record.used)
    else:
        index.adopt(row, parent)
    index.state[row] = BlockState.PRESENT
    index.place[row], index.page[row] = record.place, record.page
    index.length[row] = record.length
    index.codec[row], index.checksum[row] = record.codec, record.checksum
    index.used[row] = record.used


def _drop_lost(index: PrefixIndex, disk: DiskTier, size: int, lost: dict[int, bytes]) -> None:
    if not lost:
        return
    log.error("event=payloads_lost count=%d block_bytes=%d", len(lost), size)
    for block in lost.values():
        index.lose(index.find(block))
    disk.drop([Freed(block, size, place) for place, block in lost.items()])


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
    used = index.used
    rows = np.argsort(np.frombuffer(index.depth, np.int32), kind="stable")
    for row in reversed(rows.tolist()):
        parent = index.parent[row]
        if parent != NONE and used[parent] < used[row]:
            used[parent] = used[row]
