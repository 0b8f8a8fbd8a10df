"""Match for a request of vLLM, on whatever thread: hashing, namespaces, and every failure as a miss."""

from __future__ import annotations

import secrets
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvstore.api import KVStore, Match, MissReason
from kvstore.errors import NamespaceUnknown
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import BLOCK_TOKENS
from kvstore.namespace import Namespace
from mla.adapters.chains import Chain, Namespaces
from mla.guard import or_miss

AdapterNamer = Callable[[str, str, int], str]

PIECE_BLOCKS = 128  # that are hashed in one go, a fifth of a millisecond

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
        """``adapter_name`` names a LoRA adapter, given by name, path and number, by its weights."""
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

    def reset(self) -> None:
        """Find nothing of before from now on: a salt of its own names what this server stores."""
        self._base = replace(self._base, salt=secrets.token_hex(16))

    def match(
        self, tokens: Sequence[int], count: int, extra: Mapping[int, bytes], adapter: tuple[str, str, int]
    ) -> Answer:
        """How much of a request can be loaded, and where it leaves units; never raises.

        Of ``tokens`` the first ``count`` are asked for; more may come meanwhile.
        """

        def matched() -> Answer:
            namespace = replace(self._base, adapter=self._adapter_name(*adapter))
            try:
                return self._match(namespace, tokens, count, extra)
            except NamespaceUnknown:  # the daemon has another data directory than before
                self._namespaces.forget(namespace)
                return self._match(namespace, tokens, count, extra)

        return or_miss("match", matched, Answer(), self._count_failure)

    def _count_failure(self, kind: str) -> None:
        with self._lock:
            self._counters[f"match_failed_{kind}"] += 1

    def _match(
        self, namespace: Namespace, tokens: Sequence[int], count: int, extra: Mapping[int, bytes]
    ) -> Answer:
        key = self._namespaces.digest(namespace)
        hashes: list[bytes] = []
        extend_hashes(hashes, key, tokens, count // BLOCK_TOKENS, extra)
        # vLLM computes the last token of a prompt that is cached whole, so all of it may hit.
        whole = count % BLOCK_TOKENS == 0
        match = self._store.match(key, hashes, count + whole, store=True)
        if match.reason is MissReason.UNAVAILABLE:
            return Answer()
        return Answer(match, tuple(hashes), Chain(namespace, key, match.epoch))

    def close(self) -> None:
        """End the connection."""
        self._store.close()


def extend_hashes(
    hashes: list[bytes], key: bytes, tokens: Sequence[int], until: int, extra: Mapping[int, bytes]
) -> None:
    """Append the hashes of a chain's next blocks, up to ``until`` blocks of all its ``tokens``.

    Between two pieces other threads get the interpreter. The scheduler's would wait for
    all of them: it is asked back after 5 ms only.
    """
    for done in range(len(hashes), until, PIECE_BLOCKS):
        stop = min(until, done + PIECE_BLOCKS)
        # An array reads a list seven times faster than numpy.
        ids = array("I", tokens[done * BLOCK_TOKENS : stop * BLOCK_TOKENS])
        here = {at - done: text for at, text in extra.items() if done <= at < stop}
        hashes += block_hashes(key, ids, parent=hashes[-1] if hashes else ROOT, extra=here)
        if stop < until:
            time.sleep(0)
