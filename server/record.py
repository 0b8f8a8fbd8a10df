"""The last requests as chains of blocks, for ``latentkv plan``: no prompt, only the beginnings of hashes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kvstore.hashing import HASH_BYTES

ID_BYTES = 8  # of a block's hash: two blocks of a record are never taken for one
_ENTRY_BYTES = 200  # RAM of an entry beside its ids


@dataclass(frozen=True, slots=True)
class Recorded:
    """One prompt. ``at`` in unix seconds; ``ids``: ``ID_BYTES`` for each full block."""

    at: float
    tokens: int
    ids: bytes


class RequestRecord:
    """A queue bounded in bytes: the oldest leave. With 0 nothing is recorded. Owned by the event loop."""

    def __init__(self, limit_bytes: int, now: Callable[[], float] = time.time) -> None:
        """``now`` should go on evenly: a trace is about what came how long after what."""
        self._limit = limit_bytes
        self._now = now
        self._used = 0
        self._requests: deque[Recorded] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def note(self, tokens: int, hashes: bytes) -> None:
        """A prompt came, with the hashes of its full blocks one behind the other."""
        if not self._limit:
            return
        ids = np.frombuffer(hashes, np.uint64)[:: HASH_BYTES // ID_BYTES].tobytes()
        self._requests.append(Recorded(self._now(), tokens, ids))
        self._used += _size(len(ids))
        while self._used > self._limit:
            self._used -= _size(len(self._requests.popleft().ids))

    def batches(self, size: int) -> Iterator[list[Recorded]]:
        """What is recorded, oldest first, as it is now."""
        requests = iter(list(self._requests))
        while batch := list(islice(requests, size)):
            yield batch


def _size(ids: int) -> int:
    return _ENTRY_BYTES + ids
