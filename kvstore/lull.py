"""When to begin writing: those who store have memory and processors to themselves until they pause.

Copies into the arena run at the speed of memory, and reading the same memory for the disk
beside them slows both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SECONDS = 0.05  # without a new block


class Lull:
    """Whether blocks have ceased to come. Owned by the store's event loop."""

    def __init__(self, enough_bytes: int, on_come: Callable[[], None]) -> None:
        """``on_come`` is called once no block has come for a while. So many bytes don't wait for that."""
        self._enough = enough_bytes
        self._on_come = on_come
        self._last = 0.0  # when the last block came, by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._hurried = False

    def note(self) -> None:
        """A block came."""
        self._last = asyncio.get_running_loop().time()
        if self._timer is None:
            self._arm(SECONDS)

    def _arm(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        left = self._last + SECONDS - asyncio.get_running_loop().time()
        if left > 0:
            self._arm(left)
        else:
            self._timer = None
            self._on_come()

    def hurry(self) -> None:
        """Somebody waits for the disk: no more waiting until nothing waits to be written."""
        self._hurried = True
        self._on_come()

    def come(self, waiting_bytes: int) -> bool:
        """Whether writing so many bytes, which is all there is, may begin."""
        self._hurried = self._hurried and waiting_bytes > 0
        return self._hurried or self._timer is None or not 0 < waiting_bytes < self._enough

    def close(self) -> None:
        """No more blocks come."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._on_come()
