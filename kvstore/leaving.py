"""Blocks and units that are gone from the index and have still to leave the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from kvstore.disk import Freed


@dataclass(eq=False, slots=True)
class Leaving:
    """Some of them, and who waits until they have left. Owned by the store's event loop."""

    freed: list[Freed] = field(default_factory=list)
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.freed)

    def has_any(self, blocks: Collection[bytes]) -> bool:
        """Whether one of these blocks is here."""
        return bool(blocks) and any(item.hash in blocks for item in self.freed)

    def blocks(self) -> set[bytes]:
        """The hashes of all that is here."""
        return {item.hash for item in self.freed}

    def gone(self) -> asyncio.Future[None]:
        """Done once all that is here now has left the disk; cancelled if the store ends before."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.freed:
            self._waiters.append(waiter)
        else:
            waiter.set_result(None)
        return waiter

    def settle(self) -> None:
        """All of it has left."""
        self.freed = []
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def take(self) -> Leaving:
        """All of it, for a batch; nothing is left here."""
        taken = Leaving(self.freed, self._waiters)
        self.freed, self._waiters = [], []
        return taken

    def put_back(self, taken: Leaving) -> None:
        """A batch could not free these: they come first the next time."""
        self.freed = taken.freed + self.freed
        self._waiters = taken._waiters + self._waiters

    def cancel(self) -> None:
        """The store ends: nobody shall wait any longer."""
        for waiter in self._waiters:
            waiter.cancel()
