"""Which chain a request of an engine belongs to, and opening its namespace in each process."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvstore.api import KVStore
from kvstore.errors import NamespaceUnknown
from kvstore.namespace import Namespace


@dataclass(frozen=True)
class Chain:
    """Where a request's blocks are kept; ``key`` is the namespace's digest, ``epoch`` that of its Match."""

    namespace: Namespace
    key: bytes
    epoch: int | None = None


class Namespaces:
    """Digests of the namespaces in use, each opened once. Thread-safe."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._lock = threading.Lock()  # not held across a call of the store
        self._digests: dict[Namespace, bytes] = {}

    def digest(self, namespace: Namespace) -> bytes:
        """Raises ``Unavailable`` while the store is away."""
        with self._lock:
            digest = self._digests.get(namespace)
        if digest is None:
            digest = self._store.open_namespace(namespace)
            with self._lock:
                self._digests[namespace] = digest
        return digest

    def require(self, chain: Chain) -> bytes:
        """The digest that another process was told, once this one knows it too.

        Raises ``Unavailable``, and ``NamespaceUnknown`` when the store tells another one.
        """
        if self.digest(chain.namespace) != chain.key:
            self.forget(chain.namespace)  # the daemon has another data directory than before
            if self.digest(chain.namespace) != chain.key:
                raise NamespaceUnknown(f"namespace {chain.key[:8].hex()} is not the store's; match anew")
        return chain.key

    def forget(self, namespace: Namespace) -> None:
        """The store has lost it: open it anew."""
        with self._lock:
            self._digests.pop(namespace, None)
