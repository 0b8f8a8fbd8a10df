"""The catalogue's records, and which of them can't be right: damaged, misplaced, without block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvstore.catalog import BlockRecord, Catalog, UnitRecord
from kvstore.errors import InvalidArgument
from kvstore.hashing import ROOT
from kvstore.layout import LatentLayout
from kvstore.namespace import Namespace


class FaultKind(StrEnum):
    """What is wrong with something that a data directory holds."""

    RECORD_DAMAGED = "record_damaged"  # a record does not verify
    NAMESPACE_UNKNOWN = "namespace_unknown"  # of a record
    BLOCK_MISPLACED = "block_misplaced"  # its record contradicts its parent's
    UNIT_WITHOUT_BLOCK = "unit_without_block"
    UNIT_MISPLACED = "unit_misplaced"  # its record contradicts its block's
    PLACE_SHARED = "place_shared"  # two records name one payload
    PAYLOAD_WRONG = "payload_wrong"  # missing, or not what the record says
    PAYLOAD_UNREADABLE = "payload_unreadable"  # the disk could not be read
    FILE_DAMAGED = "file_damaged"


@dataclass(frozen=True, slots=True)
class Fault:
    """One of them. ``subject`` is a hash or key in hex, or a path."""

    kind: FaultKind
    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class Damaged:
    """Keys of the records that do not verify, or name no namespace."""

    namespaces: list[bytes]
    blocks: list[bytes]
    units: list[bytes]


class CheckedCatalog(Catalog):
    """A catalogue that also shows and drops what ``Catalog`` skips."""

    def damaged(self) -> Damaged:
        """The records that do not verify. Raises ``DiskError``."""
        known = {number.to_bytes(4, "little") for number, text, _ in self.namespaces() if _layout(text)}
        blocks = {block for chunk in self.blocks() for block in chunk["hash"].tolist()}
        units = {unit.hash for unit in self.units()}
        return Damaged(
            namespaces=[key for key, _ in self._scan(self._namespaces) if key not in known],
            blocks=[key for key, _ in self._scan(self._blocks) if key not in blocks],
            units=[key for key, _ in self._scan(self._units) if key not in units],
        )

    def drop_damaged(self, damaged: Damaged) -> None:
        """Drop these records. Raises ``DiskError``."""
        self.commit(drop_blocks=damaged.blocks, drop_units=damaged.units)
        if damaged.namespaces:
            self._write(lambda txn: [txn.delete(key, db=self._namespaces) for key in damaged.namespaces])


class Records:
    """All sound records of a catalogue. Raises ``DiskError``."""

    def __init__(self, catalog: CheckedCatalog) -> None:
        self.layouts: dict[int, LatentLayout] = {
            number: layout for number, text, _ in catalog.namespaces() if (layout := _layout(text))
        }
        self.blocks: dict[bytes, BlockRecord] = {
            fields[0]: BlockRecord(*fields) for chunk in catalog.blocks() for fields in chunk.tolist()
        }
        self.units: list[UnitRecord] = list(catalog.units())
        self.damaged = catalog.damaged()

    def faults(self) -> Iterator[Fault]:
        """What is wrong by the records alone."""
        for what, keys in (
            ("namespace", self.damaged.namespaces),
            ("block", self.damaged.blocks),
            ("unit", self.damaged.units),
        ):
            for key in keys:
                yield Fault(FaultKind.RECORD_DAMAGED, key.hex(), f"the record of a {what} does not verify")
        for block in self.blocks.values():
            yield from self._block_faults(block)
        for unit in self.units:
            yield from self._unit_faults(unit)

    def _block_faults(self, block: BlockRecord) -> Iterator[Fault]:
        if block.namespace not in self.layouts:
            detail = f"the block names namespace {block.namespace}, which is not there"
            yield Fault(FaultKind.NAMESPACE_UNKNOWN, block.hash.hex(), detail)
        elif not self.placed(block):
            detail = f"it can't be block {block.depth} of its chain behind {block.parent.hex()}"
            yield Fault(FaultKind.BLOCK_MISPLACED, block.hash.hex(), detail)

    def placed(self, block: BlockRecord) -> bool:
        """Whether a block stands where its parent's record says, as far as there is one to be believed."""
        if block.parent == ROOT:
            return block.depth == 1
        parent = self.blocks.get(block.parent)
        if parent is None or parent.namespace not in self.layouts:
            return True
        return (parent.namespace, parent.depth + 1) == (block.namespace, block.depth)

    def _unit_faults(self, unit: UnitRecord) -> Iterator[Fault]:
        block = self.blocks.get(unit.hash)
        if block is None:
            yield Fault(
                FaultKind.UNIT_WITHOUT_BLOCK, unit.hash.hex(), "a unit ends at a block that is not stored"
            )
        elif not self.fits(unit, block):
            detail = f"a unit of {unit.tokens} tokens ends at block {block.depth} of its chain"
            yield Fault(FaultKind.UNIT_MISPLACED, unit.hash.hex(), detail)

    def fits(self, unit: UnitRecord, block: BlockRecord) -> bool:
        """Whether a unit's record agrees with the record of its last block."""
        layout = self.layouts.get(block.namespace)
        tokens = block.depth * layout.block_tokens if layout else unit.tokens
        return (unit.namespace, unit.tokens) == (block.namespace, tokens)

    def cut_off(self, among: set[bytes]) -> int:
        """How many of these well placed blocks no hit reaches, for one before them is not among these."""
        reached = {ROOT}
        for block in sorted(self.blocks.values(), key=lambda block: block.depth):
            if block.hash in among and block.parent in reached:
                reached.add(block.hash)
        return len(among) - len(reached - {ROOT})


def _layout(text: str) -> LatentLayout | None:
    try:
        return Namespace.from_json(text).layout
    except InvalidArgument:
        return None
