"""What goes with each call so that the daemon knows whose it is."""

from __future__ import annotations

import threading

from kvstore import wire
from kvstore.errors import ArenaUnavailable
from kvstore.identity import Identity
from kvstore.mapping import Introduction, introduce

Metadata = tuple[tuple[str, str], ...]


class Proof:
    """A token's metadata; or, for a unix socket without a token, that of an introduction there.

    Nobody is introduced until a daemon asks for it, which one without credentials never does.
    Thread-safe.
    """

    def __init__(self, identity: Identity, socket_path: str) -> None:
        self._bearer: Metadata = (("authorization", f"Bearer {identity.token}"),) if identity.token else ()
        self._path = "" if identity.token else socket_path
        self._lock = threading.Lock()
        self._introduction: Introduction | None = None

    def metadata(self) -> Metadata:
        """What a call brings now."""
        known = self._introduction
        return self._bearer if known is None else ((wire.WORKER_KEY, known.token.hex()),)

    def renew(self, refused: Metadata, timeout: float) -> bool:
        """Whether there is better metadata than what was refused. Raises ``DeadlineExceeded``."""
        if not self._path:
            return False
        with self._lock:
            if self.metadata() == refused:
                try:
                    fresh = introduce(self._path, timeout)
                except ArenaUnavailable:
                    return False
                old, self._introduction = self._introduction, fresh
                if old is not None:
                    old.close()
        return True

    def close(self) -> None:
        """End the introduction."""
        with self._lock:
            if self._introduction is not None:
                self._introduction.close()
