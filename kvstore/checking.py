"""A whole data directory verified while nobody serves it: ``latentkv check``.

Reads every record of the catalogue and every payload that it names, and changes nothing of
them. A repair drops what can't be proven right, and nothing else: what stood on it is cut off
until that is stored again, as when a running store loses a block.
"""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from kvstore.catalog import BlockRecord
from kvstore.codec import codec_by_id
from kvstore.directory import lock_directory
from kvstore.errors import CorruptBlock, DataDirError, DiskError
from kvstore.layout import LatentLayout
from kvstore.payloads import Place
from kvstore.payloads.direct import Run
from kvstore.payloads.inspection import Inspector, inspect
from kvstore.payloads.kinds import OPEN
from kvstore.records import CheckedCatalog, Fault, FaultKind, Records
from kvstore.settings import MIB, PayloadKind

READERS = 8
_BATCH = 256  # blocks whose reads are in flight or waiting
_DROPPED_A_TXN = 4096

Progress = Callable[[int, int], None]
"""Told of the bytes of payloads that were verified, of so many."""


@dataclass(slots=True)
class Report:
    """What a check found.

    ``unnamed`` payloads are no fault: a killed daemon leaves some, and a start frees them. Nor are blocks
    that are ``cut_off``, sound but behind one that is not: they take room until eviction comes to them,
    or that one is stored again and heals the chain.
    """

    path: Path
    payloads: PayloadKind
    namespaces: int = 0
    blocks: int = 0
    units: int = 0
    payload_bytes: int = 0
    unnamed: int = 0
    cut_off: int = 0
    faults: list[Fault] = field(default_factory=list)
    dropped_blocks: int = 0
    dropped_units: int = 0

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def counts(self) -> dict[str, int]:
        """How many faults of each kind."""
        return dict(Counter(fault.kind.value for fault in self.faults))


def _open_catalog(file: Path) -> CheckedCatalog:
    # One whose daemon was killed while it made it is smaller than its databases will be.
    return CheckedCatalog.open(file.parent, max(file.stat().st_size, MIB))


def check(path: Path, *, repair: bool = False, progress: Progress = lambda done, total: None) -> Report:
    """Verify a data directory that nobody serves; with ``repair`` drop what does not verify.

    Raises ``DataDirInUse``, ``DataDirReadOnly``, ``FormatMismatch`` and other kinds of
    ``DataDirError`` when it is none or can't be opened, and ``DiskError``.
    """
    file = path / "catalog" / "data.mdb"
    if not file.is_file():
        raise DataDirError(f"{path} holds no store: there is no {file}; name the directory of a store")
    with closing(lock_directory(path)), closing(_open_catalog(file)) as it:
        checkup = _Checkup(path, it, progress)
        checkup.run()
        if repair and (checkup.report.faults or checkup.report.unnamed):
            checkup.repair()
        return checkup.report


class _Checkup:
    def __init__(self, path: Path, catalog: CheckedCatalog, progress: Progress) -> None:
        self._catalog = catalog
        self._progress = progress
        kind: PayloadKind = "slab" if catalog.claimed("payloads") == "slab" else "lmdb"
        self.report = Report(path, kind)
        self._records = Records(catalog)
        self._by_size: defaultdict[int, list[BlockRecord]] = defaultdict(list)
        self._bad: set[bytes] = set()  # blocks whose payload is not what it should be
        self._done = 0

    def run(self) -> None:
        """Find every fault."""
        report, records = self.report, self._records
        report.namespaces, report.blocks = len(records.layouts), len(records.blocks)
        report.units = len(records.units)
        report.payload_bytes = sum(block.length for block in records.blocks.values())
        report.faults += records.faults()
        for block in records.blocks.values():
            if block.namespace in records.layouts:
                self._by_size[records.layouts[block.namespace].block_bytes].append(block)
        for size in sorted(self._sizes_on_disk() | set(self._by_size)):
            with closing(inspect(report.payloads, self._directory(size), size)) as inspector:
                self._check_size(size, inspector)
        report.cut_off = records.cut_off(self._good())
        self._progress(report.payload_bytes, report.payload_bytes)

    def _directory(self, size: int) -> Path:
        return self.report.path / "payloads" / str(size)

    def _sizes_on_disk(self) -> set[int]:
        return {int(found.name) for found in self._directory(0).parent.glob("*") if found.name.isdecimal()}

    def _check_size(self, size: int, inspector: Inspector) -> None:
        blocks = self._by_size[size]
        if inspector.damage and self._directory(size).is_dir():
            self._fault(FaultKind.FILE_DAMAGED, str(self._directory(size)), inspector.damage)
        self.report.unnamed += len(inspector.stored() - {block.place for block in blocks})
        blocks.sort(key=lambda block: (block.page, block.place))  # as they lie on the disk
        with ThreadPoolExecutor(READERS) as threads:
            for start in range(0, len(blocks), _BATCH):
                batch = blocks[start : start + _BATCH]
                proofs = threads.map(lambda block: self._proof(inspector, block), batch)
                for block, fault in zip(batch, proofs, strict=True):
                    self._checked(block, fault)
        self._check_places(blocks)

    def _checked(self, block: BlockRecord, fault: tuple[FaultKind, str] | None) -> None:
        self._done += block.length
        self._progress(self._done, self.report.payload_bytes)
        if fault is not None:
            self._payload_fault(*fault, block)

    def _check_places(self, blocks: Sequence[BlockRecord]) -> None:
        """Of two blocks at one place, if their bytes are the same, one would be freed with the other."""
        first: dict[int, BlockRecord] = {}
        for block in blocks:
            if block.hash in self._bad:
                continue
            other = first.setdefault(block.place, block)
            if other is not block:
                detail = f"its payload {block.place} is also that of {other.hash.hex()}"
                self._payload_fault(FaultKind.PLACE_SHARED, detail, block)

    def _proof(self, inspector: Inspector, block: BlockRecord) -> tuple[FaultKind, str] | None:
        """What is wrong with a block's payload; None if it verifies."""
        layout = self._records.layouts[block.namespace]
        try:
            try:
                _verify(inspector, block, layout, block.page)
            except CorruptBlock:
                if not block.page:
                    raise
                _verify(inspector, block, layout, 0)  # as the store does: perhaps only the page is wrong
        except CorruptBlock as error:
            return FaultKind.PAYLOAD_WRONG, str(error)
        except DiskError as error:
            return FaultKind.PAYLOAD_UNREADABLE, str(error)
        return None

    def _payload_fault(self, kind: FaultKind, detail: str, block: BlockRecord) -> None:
        self._bad.add(block.hash)
        self._fault(kind, block.hash.hex(), detail)

    def _fault(self, kind: FaultKind, subject: str, detail: str) -> None:
        self.report.faults.append(Fault(kind, subject, detail))

    def repair(self) -> None:
        """Drop all that can't be proven right: records first, then the payloads that none names."""
        records, report, good = self._records, self.report, self._good()
        blocks = [block for block in records.blocks if block not in good]
        units = [
            unit.hash
            for unit in records.units
            if unit.hash not in good or not records.fits(unit, records.blocks[unit.hash])
        ]
        for start in range(0, max(len(blocks), len(units)), _DROPPED_A_TXN):
            part = slice(start, start + _DROPPED_A_TXN)
            self._catalog.commit(drop_blocks=blocks[part], drop_units=units[part])
        self._catalog.drop_damaged(records.damaged)
        report.dropped_blocks = len(blocks) + len(records.damaged.blocks)
        report.dropped_units = len(units) + len(records.damaged.units)
        for size in self._sizes_on_disk():
            self._free(size, [block for block in self._by_size[size] if block.hash in good])

    def _good(self) -> set[bytes]:
        """Blocks that are what their records say, by all that was checked so far."""
        records = self._records
        return {
            block.hash
            for block in records.blocks.values()
            if block.namespace in records.layouts and records.placed(block) and block.hash not in self._bad
        }

    def _free(self, size: int, named: Sequence[BlockRecord]) -> None:
        directory = self._directory(size)
        if not named:
            shutil.rmtree(directory)
            return
        # No smaller than they are, so that nothing is stretched, and nothing replaced.
        limit = max(MIB, *(file.stat().st_size for file in directory.iterdir()))
        keys = [block.place for block in named]
        with closing(OPEN[self.report.payloads](directory, limit, size, 1 + max(keys))) as payloads:
            payloads.retain(keys)


def _verify(inspector: Inspector, block: BlockRecord, layout: LatentLayout, page: int) -> None:
    """Raises ``CorruptBlock`` unless the payload is the block, and ``DiskError`` if it can't be read."""
    if not 0 < block.length <= layout.block_bytes:
        raise CorruptBlock(f"a payload of {block.length} bytes for a block of {layout.block_bytes}")
    codec = codec_by_id(block.codec)
    run = Run.fresh(inspector.lead, block.length)
    inspector.read_into(Place(block.place, page), run)
    data: bytes | bytearray | memoryview = run.payload
    if not codec.in_place:
        data = bytearray(layout.block_bytes)
        codec.decode_into(run.payload, memoryview(data), layout.dtype.itemsize)
    found = xxhash.xxh3_64_intdigest(data)
    if found != block.checksum or len(data) != layout.block_bytes:
        raise CorruptBlock(f"payload {block.place}: checksum {found:016x}, expected {block.checksum:016x}")
