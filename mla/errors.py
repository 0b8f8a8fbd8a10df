"""Outcomes of the attention, the pool and the adapters that a caller can act on."""

from __future__ import annotations

from kvstore.errors import InvalidArgument, KVStoreError


class Unsupported(InvalidArgument):
    """A model or a call that cannot be served right, so it is refused; the message says why."""


class PoolFull(KVStoreError):
    """The device pool has too few unreferenced blocks; nothing was changed."""
