"""Where in which slab a payload lies: sizes, names and keys; and writes of neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.payloads.direct import PAGE_BYTES, pages
from kvstore.payloads.slab_file import Slab

# One call writes neighbours in the file up to so many, or up to the first that reaches so many bytes: more of
# these before the disk at a time would only delay the catalogue's syncs, which the next batch waits for.
RUN_SLOTS = 16
RUN_BYTES = 8 << 20
EIGHTHS = 8
SLOT_BITS = 24  # of a key: the slot's number in its slab; above it the slab's number


def slot_bytes(block_bytes: int, eighths: int) -> int:
    """Bytes of a slot for payloads of so many eighths of a block."""
    return pages(min(-(-block_bytes // EIGHTHS) * eighths, block_bytes)) * PAGE_BYTES


def eighths_of(block_bytes: int, length: int) -> int:
    """Eighths of a block that a payload of ``length`` bytes takes."""
    return -(-length // -(-block_bytes // EIGHTHS))


def slab_name(eighths: int, number: int) -> str:
    """Name of a slab's file."""
    return f"slab-{eighths}-{number}"


def split_key(key: int) -> tuple[int, int, int]:
    """Eighths of a block, number of the slab, and slot in it, of a place's key."""
    at, eighths = divmod(key, EIGHTHS)
    return eighths + 1, at >> SLOT_BITS, at & ((1 << SLOT_BITS) - 1)


@dataclass(slots=True)
class SlotWrite:
    """Neighbouring slots of one slab, and what goes there."""

    slab: Slab
    slot: int
    data: list[memoryview]

    def joins(self, slab: Slab, slot: int) -> bool:
        """Whether this slot comes next, and what comes before it fills its own slot."""
        return (
            slab is self.slab
            and slot == self.slot + len(self.data)
            and len(self.data[-1]) == slab.slot_bytes
            and len(self.data) < RUN_SLOTS
            and len(self.data) * slab.slot_bytes < RUN_BYTES
        )

    def run(self) -> None:
        """Raises ``OSError``."""
        self.slab.file.write(self.data, self.slot * self.slab.slot_bytes)
