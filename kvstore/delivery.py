"""A Load as its caller sees it, whatever brings its blocks: batches in order, ``short``, and the end.

A failure on the way never raises inside the iteration: it ends with ``short`` at what
was delivered whole.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from kvstore.api import LoadedBlock
from kvstore.ending import end_when_dropped
from kvstore.errors import KVStoreError
from kvstore.lending import Lent

log = logging.getLogger(__name__)


class Source(Protocol):
    """Where the blocks of one Load come from."""

    def receive(self, expected: int) -> list[Lent] | int:
        """The next blocks, ``expected`` on. Or, when the hit ends there, how many leading hashes are usable.

        Raises ``KVStoreError`` when no more come.
        """

    def give_back(self, indices: Sequence[int]) -> None:
        """The caller is done with these blocks, and nobody can look at them."""

    def end(self, seen: Sequence[Lent], *, wait: bool) -> None:
        """Leave nothing held; what is still ``seen`` not before nobody can look at it.

        ``wait`` for whoever holds it to know, unless nothing came lately.
        """


class _Out:
    """The blocks that are with the caller, or that he can still look at, by index. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: dict[int, Lent] = {}
        self._over = False

    def lend(self, first: int, lent: Sequence[Lent]) -> bool:
        """They are with the caller from now on; False if the Load was ended meanwhile."""
        with self._lock:
            if not self._over:
                self._lent.update(enumerate(lent, first))
            return not self._over

    def take_back(self) -> list[int]:
        """The caller's time with them is over. Those that nobody can look at."""
        with self._lock:
            unseen = [index for index, one in self._lent.items() if one.end()]
            for index in unseen:
                del self._lent[index]
        return unseen

    def end(self) -> list[Lent]:
        """Nothing is lent any more. What can still be looked at."""
        with self._lock:
            self._over = True
            lent, self._lent = self._lent, {}
        return [one for one in lent.values() if not one.end()]


def _end(source: Source, out: _Out, *, wait: bool) -> None:
    unseen = out.take_back()
    if unseen and wait:
        source.give_back(unseen)  # the last that it got: they were delivered too
    source.end(out.end(), wait=wait)


class BlockLoad:
    """A ``kvstore.api.Load`` over a source. It ends with its ``with`` or its owner, or when dropped."""

    def __init__(self, source: Source, first: int, count: int, owner: object) -> None:
        """Of blocks ``[first, count)``. ``owner`` is kept as long as the Load is."""
        self._source = source
        self._next = first  # blocks before it were delivered, or not asked for
        self._count = count
        self._owner = owner
        self._out = _Out()
        self._broken = False
        self._ending = end_when_dropped(self, partial(_end, source, self._out, wait=False))
        self.short: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=not self._broken)

    def close(self, *, wait: bool) -> None:
        """End it, from whatever thread; a second call does nothing."""
        if self._ending.detach() is not None:
            _end(self._source, self._out, wait=wait)

    def __iter__(self) -> Iterator[list[LoadedBlock]]:
        while self._ending.alive and self.short is None and self._next < self._count:
            got = self._receive()
            if isinstance(got, int):
                self.short = min(max(got, 0), self._next)
                return
            first = self._next
            if not self._out.lend(first, got):
                break
            self._next += len(got)
            yield [LoadedBlock(index, one.view) for index, one in enumerate(got, first)]
            unseen = self._out.take_back()
            if unseen and self._ending.alive:
                self._source.give_back(unseen)
        if self.short is None and not self._ending.alive:  # ended by somebody else: nothing more is sure
            self.short = self._next

    def _receive(self) -> list[Lent] | int:
        try:
            return self._source.receive(self._next)
        except KVStoreError as error:
            log.warning("event=load_cut blocks=%d of=%d reason=%s", self._next, self._count, error)
            self._broken = True
            return self._next


class EndedLoad:
    """A Load that could not start: a miss."""

    def __init__(self, short: int) -> None:
        self.short: int | None = short

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __iter__(self) -> Iterator[list[LoadedBlock]]:
        return iter(())
