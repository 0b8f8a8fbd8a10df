"""How the bytes of requests come in: in bounded time, and a bounded number of them at once.

A peer that sends slowly holds a place here. When somebody waits for one, the peer that has held
its place longest has no more time than patience: so slow peers cost others a moment, not their calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvstore.errors import LimitReached

MAX_CALLS = 1024  # of one caller at once, with those that wait for durability and open streams
PLACES = 32  # messages that come in at once, for one caller; each may be of 8 MiB
PATIENCE = 1.0  # seconds for a peer when others wait


class Reception:
    """The calls of one caller, and their messages that are coming in. Owned by the event loop."""

    def __init__(self, seconds: float) -> None:
        """Each message has ``seconds`` at most."""
        self.seconds = seconds
        self.calls = 0
        self._places = asyncio.Semaphore(PLACES)
        self._inside: dict[asyncio.Timeout, float] = {}  # since when, longest first

    @contextmanager
    def call(self) -> Iterator[None]:
        """One more call, until it ends. Raises ``LimitReached``.

        When there are enough, one that is still to say what it wants makes room for it.
        """
        if self.calls >= MAX_CALLS and not self._hurry(0.0):
            raise LimitReached(f"{MAX_CALLS} calls of this caller are open already; wait for some to end")
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place to receive a message in. Raises ``TimeoutError`` when the time is over."""
        async with asyncio.timeout(self.seconds) as limit:
            if self._places.locked():
                self._hurry(PATIENCE)
            async with self._places:
                self._inside[limit] = asyncio.get_running_loop().time()
                try:
                    yield
                finally:
                    self._inside.pop(limit, None)

    def _hurry(self, patience: float) -> bool:
        """Whoever has been inside longest has so many seconds in all; whether there is one."""
        longest = next(iter(self._inside), None)
        if longest is None:
            return False
        since = self._inside.pop(longest)
        soon, until = since + patience, longest.when()
        longest.reschedule(soon if until is None else min(soon, until))
        return True
