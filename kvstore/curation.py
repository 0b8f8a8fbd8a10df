"""What an operator does with what a store holds: look at its units, and delete them for good."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from kvstore.erasing import Eraser
from kvstore.errors import NamespaceUnknown, UnitUnknown
from kvstore.hashing import HASH_BYTES
from kvstore.pins import Pin, Pins
from kvstore.prefix_index import NONE, PrefixIndex
from kvstore.spaces import SpaceTable
from kvstore.survey import UnitSurvey, unit_survey

Result = TypeVar("Result")
UnitOrder = Literal["used", "created", "tokens", "hits"]
UNIT_ORDERS: tuple[UnitOrder, ...] = ("used", "created", "tokens", "hits")


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a deletion took: namespaces looked at, and blocks that left."""

    namespaces: int
    blocks: int


class Curator:
    """Units by name, for people. Owned by the store's event loop.

    A unit is named by the hash of its last block in hex, or by enough of its beginning. A deletion
    goes on when its caller stops waiting.
    """

    def __init__(
        self,
        index: PrefixIndex,
        spaces: SpaceTable,
        pins: Pins,
        eraser: Eraser,
        to_wall: Callable[[float], float],
    ) -> None:
        self._index = index
        self._spaces = spaces
        self._pins = pins
        self._eraser = eraser
        self._to_wall = to_wall  # of times of the store: people see those of the wall clock
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def busy(self) -> bool:
        """Whether a deletion is under way."""
        return bool(self._tasks)

    async def units(
        self, *, tenant: str | None = None, order: UnitOrder = "used", limit: int = 100
    ) -> list[UnitSurvey]:
        """The first units in an order, largest or latest first; of one tenant if it is named."""
        index, spaces = self._index, self._spaces

        keys: dict[UnitOrder, Callable[[int], float]] = {
            "used": lambda row: index.units[row].used,
            "created": lambda row: index.units[row].created,
            "tokens": lambda row: index.depth[row],
            "hits": lambda row: index.units[row].hits,
        }
        rows = (
            row for row in index.units if tenant in (None, spaces.of(index.namespace[row]).namespace.tenant)
        )
        return [self._survey(row) for row in heapq.nlargest(limit, rows, keys[order])]

    async def unit(self, name: str) -> UnitSurvey:
        """One unit. Raises ``UnitUnknown``."""
        return self._survey(self._find(name))

    async def pin(self, name: str, seconds: float) -> Pin:
        """Keep a unit from eviction and expiry for ``seconds``; the pin's handle ends or extends that.

        Raises ``UnitUnknown``, ``InvalidArgument``, ``PinLimit`` and ``DiskError``.
        """

        async def pin() -> Pin:
            return await self._pins.pin(self._find(name), seconds)

        return self._shown(await self._finish(pin()))

    async def extend(self, handle: str, seconds: float) -> Pin:
        """Let a pin live for ``seconds`` from now. Raises ``PinUnknown`` and ``DiskError``."""
        return self._shown(await self._finish(self._pins.extend(handle, seconds)))

    async def unpin(self, handle: str) -> None:
        """End a pin. Raises ``PinUnknown`` and ``DiskError``."""
        await self._finish(self._pins.unpin(handle))

    async def pins(self, *, tenant: str | None = None) -> list[Pin]:
        """All pins, those that end first before others; of one tenant if it is named."""
        found = [
            pin for pin in self._pins if tenant in (None, self._spaces.of(pin.namespace).namespace.tenant)
        ]
        return [self._shown(pin) for pin in sorted(found, key=lambda pin: pin.expires)]

    def _survey(self, row: int) -> UnitSurvey:
        return unit_survey(self._index, self._spaces, row, self._to_wall)

    def _shown(self, pin: Pin) -> Pin:
        return replace(pin, created=self._to_wall(pin.created), expires=self._to_wall(pin.expires))

    async def delete_unit(self, name: str) -> Deleted:
        """Delete a unit, and its blocks that no other unit and no longer chain needs.

        Raises ``UnitUnknown``, ``UnitPinned``, and ``DiskError`` when the deletion cannot be written down.
        """

        async def delete() -> int:
            row = self._find(name)
            return await self._eraser.unit(self._spaces.of(self._index.namespace[row]), row)

        return Deleted(1, await self._finish(delete()))

    async def delete_namespaces(self, *, tenant: str | None = None, digest: str | None = None) -> Deleted:
        """Delete all of a tenant, or of one namespace, named by its digest in hex or a beginning of it; the
        pins too.

        Raises ``NamespaceUnknown`` when there is none, or more than one begins so, and ``DiskError``.
        """
        spaces = [space for space in self._spaces if space.namespace.tenant == tenant]
        if digest is not None:
            spaces = [space for space in self._spaces if digest and space.digest.hex().startswith(digest)]
        if not spaces or (digest is not None and len(spaces) > 1):
            what = f"tenant {tenant!r}" if digest is None else f"digest {digest!r}"
            raise NamespaceUnknown(
                f"{len(spaces)} namespaces have {what}; look at the status for their names"
            )
        blocks = 0
        for space in spaces:
            if self._spaces.known(space.id) is not None:  # else it was retired meanwhile, being empty
                blocks += await self._finish(self._eraser.namespace(space))
        return Deleted(len(spaces), blocks)

    async def _finish(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do some work to its end, though its caller may stop waiting.

        The work begins in a later turn of the loop: what it is about it looks up itself.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def _find(self, name: str) -> int:
        index = self._index
        if len(name) == 2 * HASH_BYTES:
            row = index.find(bytes.fromhex(name)) if _is_hex(name) else NONE
            rows = [row] if row in index.units else []
        else:
            rows = [row for row in index.units if name and index.hashes[row].hex().startswith(name)]
        if len(rows) != 1:
            raise UnitUnknown(
                f"{len(rows)} units have names that begin with {name!r:.80}; list them and name one"
            )
        return rows[0]

    def close(self) -> None:
        """The store ends: what is not deleted yet is deleted at the next start, or was never begun."""
        for task in self._tasks:
            task.cancel()


def _is_hex(name: str) -> bool:
    return all(char in "0123456789abcdef" for char in name)
