"""A slot of the arena: its states, and what is known of one that is in use."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from kvstore.extents import Extent

NO_OWNER = -1


class SlotState(IntEnum):
    """What a slot holds."""

    FREE = 0
    FILLING = 1
    DIRTY = 2  # readable, not on disk
    CLEAN = 3  # readable, also on disk
    ORPHAN = 4  # its block is gone, but somebody still holds it
    LOOSE = 5  # readable, not on disk, and not meant to get there


READABLE = (SlotState.DIRTY, SlotState.CLEAN, SlotState.LOOSE)


class Taken(NamedTuple):
    """A slot in state FILLING with one hold, and the owners whose slots were evicted for it."""

    slot: int
    evicted: tuple[int, ...]


@dataclass(slots=True, eq=False)
class SlotClass:
    """The slots of one size, and those of them that may be given out or evicted."""

    nbytes: int
    pages: int
    open: dict[int, Extent] = field(default_factory=dict)  # by start: those with a FREE slot
    clean: OrderedDict[int, Slot] = field(default_factory=OrderedDict)  # not held; least recent first
    dirty: OrderedDict[int, Slot] = field(default_factory=OrderedDict)  # the same, DIRTY


@dataclass(slots=True, eq=False)
class Slot:
    """One that is in use."""

    extent: Extent
    owner: int
    state: SlotState = SlotState.FILLING
    holders: int = 1
    stamp: int = 0
