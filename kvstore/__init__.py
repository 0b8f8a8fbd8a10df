"""The storage engine of latentkv and its client library. No torch in here.

``kvstore.open(path)`` gives an embedded store, ``kvstore.connect(url)`` one behind a
daemon; both are a ``kvstore.api.KVStore``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.client import Client
    from kvstore.embedded import Embedded
    from kvstore.identity import Identity

__all__ = ["connect", "open"]


# Imported inside: a worker that connects needs no LMDB, an embedded store no gRPC.
def open(path: str | Path, **settings: Any) -> Embedded:
    """Open or create an embedded store in directory ``path``; see ``StoreSettings`` for the rest.

    Raises ``DataDirInUse``, ``DataDirReadOnly``, ``FormatMismatch``, ``ArenaUnavailable``
    and ``InvalidArgument``.
    """
    from kvstore.embedded import Embedded
    from kvstore.settings import StoreSettings

    return Embedded(StoreSettings(data=Path(path), **settings))


def connect(url: str, *, timeout: float = 5.0, identity: Identity | None = None) -> Client:
    """A client of the daemon at ``unix:///path``, ``host:port`` or ``tls://host:port``.

    ``timeout`` (seconds) bounds each call; ``identity`` is what a daemon with credentials knows us by.
    Never fails because the daemon is away: then everything is a miss until it is back. Raises
    ``InvalidArgument`` for a url or an identity that cannot be used.
    """
    from kvstore.client import Client
    from kvstore.identity import NOBODY

    return Client(url, timeout, identity or NOBODY)
