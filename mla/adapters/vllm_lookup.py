"""Match for a request of vLLM, on whatever thread: hashing, namespaces, and every failure as a miss."""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvstore.api import KVStore, Match, MissReason
from kvstore.errors import NamespaceUnknown
from kvstore.hashing import block_hashes
from kvstore.layout import BLOCK_TOKENS
from kvstore.namespace import Namespace
from mla.adapters.chains import Chain, Namespaces
from mla.guard import or_miss

AdapterNamer = Callable[[str, str], str]


_NONE = Match(reason=MissReason.UNAVAILABLE)


@dataclass(frozen=True)
class Answer:
    """What Match said, and of which chain. Without one nothing is loaded or stored."""

    match: Match = _NONE
    hashes: tuple[bytes, ...] = ()
    chain: Chain | None = None


class Lookup:
    """Asks the store. Thread-safe."""

    def __init__(self, store: KVStore, base: Namespace, adapter_name: AdapterNamer) -> None:
        """``adapter_name`` names a LoRA adapter, given by name and path, by its weights."""
        self._store = store
        self._base = base
        self._adapter_name = adapter_name
        self._namespaces = Namespaces(store)
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()

    def counters(self) -> Counter[str]:
        """Failures by kind."""
        with self._lock:
            return self._counters.copy()

    def match(self, tokens: Sequence[int], extra: Mapping[int, bytes], adapter: tuple[str, str]) -> Answer:
        """How much of a request can be loaded, and where it leaves units; never raises."""

        def matched() -> Answer:
            namespace = replace(self._base, adapter=self._adapter_name(*adapter))
            try:
                return self._match(namespace, tokens, extra)
            except NamespaceUnknown:  # the daemon has another data directory than before
                self._namespaces.forget(namespace)
                return self._match(namespace, tokens, extra)

        return or_miss("match", matched, Answer(), self._count_failure)

    def _count_failure(self, kind: str) -> None:
        with self._lock:
            self._counters[f"match_failed_{kind}"] += 1

    def _match(self, namespace: Namespace, tokens: Sequence[int], extra: Mapping[int, bytes]) -> Answer:
        key = self._namespaces.digest(namespace)
        # Seven times faster than numpy reads a list, all of which the scheduler's thread would wait for.
        ids = np.frombuffer(array("I", tokens), np.uint32)
        hashes = block_hashes(key, ids, extra=extra)
        # vLLM computes the last token of a prompt that is cached whole, so all of it may hit.
        whole = len(tokens) % BLOCK_TOKENS == 0
        match = self._store.match(key, hashes, len(tokens) + whole, store=True)
        if match.reason is MissReason.UNAVAILABLE:
            return Answer()
        return Answer(match, tuple(hashes), Chain(namespace, key, match.epoch))

    def close(self) -> None:
        """End the connection."""
        self._store.close()
