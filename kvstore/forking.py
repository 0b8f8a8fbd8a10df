"""Stores and clients after a fork: the child has the objects, but neither their threads nor their rights."""

from __future__ import annotations

import os

from kvstore.errors import Forked


class Home:
    """The process in which an object was made, the only one in which it may be used."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._process

    def require(self, what: str, mend: str) -> None:
        """Raises ``Forked`` in a child. Call it before any lock is taken: its holder may not exist here."""
        if not self.here:
            raise Forked(
                f"this {what} belongs to process {self._process}, of which this one is a fork; {mend} here"
            )
