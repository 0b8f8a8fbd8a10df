"""Requests of a soak: prompts that overlap, blocks that follow from their hashes, calls that are timed."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from kvstore.api import KVStore, Load, LoadedBlock, Match, ReservedBlock, ReserveState
from kvstore.errors import KVStoreError
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import BLOCK_TOKENS, DType
from kvstore.namespace import Namespace
from kvstore.testing.chains import RESERVE, SMALL, content, overlapping
from kvstore.units import UnitKind, UnitMark

# Two sizes of blocks; those of one size share slots of the arena. Small, so that the disk has little to do.
HALF = replace(SMALL, num_layers=1)
SPACES = (
    Namespace(SMALL, model="soak", tenant="red"),
    Namespace(SMALL, model="soak", tenant="blue"),
    Namespace(replace(SMALL, dtype=DType.FP16), model="soak", tenant="red"),
    Namespace(HALF, model="soak", tenant="green"),
)
SHARES = (8, 8, 8, 1)  # of the requests
DOCUMENTS = 120  # of each space
SKEW = 0.7

CALL_SECONDS = 2.0  # deadline of a call
LOAD_SECONDS = 3.0  # and of each batch of a Load
DURABLE_SECONDS = 4.0
PATIENCE = 12  # times that a store waits for room, or for another worker

Tell = Callable[..., None]
"""Takes what has happened: ``tell(event, **details)``."""

_LATER = (ReserveState.RETRY, ReserveState.PENDING)
_WEIGHTS = [1.0 / (rank + 1) ** SKEW for rank in range(DOCUMENTS)]


class Clock:
    """Calls under way, and how long each may take. Thread-safe, as each thread has one call."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._open: dict[int, tuple[str, float, float]] = {}

    @contextlib.contextmanager
    def call(self, who: int, verb: str, seconds: float) -> Iterator[None]:
        """One call, which should end within so many seconds."""
        began = time.monotonic()
        self._open[who] = (verb, began, seconds)
        try:
            yield
        finally:
            if self._open.pop(who, None):
                self._late(verb, began, seconds)

    def look(self) -> None:
        """Tell of calls that have not come back, each once."""
        for who, (verb, began, seconds) in list(self._open.items()):
            if self._late(verb, began, seconds):
                self._open.pop(who, None)

    def _late(self, verb: str, began: float, seconds: float) -> bool:
        now = time.monotonic()
        if now - began <= seconds + 1.0:
            return False
        self._tell("late", verb=verb, began=began, ended=now, allowed=seconds)
        return True


@dataclass
class Orders:
    """What a worker was told to do once, beside its requests: seconds, or 0."""

    hold: float = 0.0  # return no credits for so long
    squat: float = 0.0  # hold slots that are half filled
    drop: float = 0.0  # forget a Load that is open

    def take_hold(self) -> float:
        """The order to hold, which is carried out now."""
        seconds, self.hold = self.hold, 0.0
        return seconds

    def take_squat(self) -> float:
        """The order to squat, which is carried out now."""
        seconds, self.squat = self.squat, 0.0
        return seconds

    def take_drop(self) -> bool:
        """The order to forget a Load, which is carried out now."""
        seconds, self.drop = self.drop, 0.0
        return seconds > 0


@dataclass
class Requester:
    """One session after the other over a store. ``who`` names its thread."""

    store: KVStore
    who: int
    rng: random.Random
    tell: Tell
    clock: Clock
    orders: Orders = field(default_factory=Orders)
    keys: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = [self.store.open_namespace(space) for space in SPACES]

    def hashes(self, space: int, number: int) -> list[bytes]:
        """The chain of a document."""
        return block_hashes(self.keys[space], overlapping(number))

    def choose(self) -> tuple[int, int]:
        """The next request: a space and a document, some far more often than others."""
        (space,) = self.rng.choices(range(len(SPACES)), SHARES)
        (rank,) = self.rng.choices(range(DOCUMENTS), _WEIGHTS)
        return space, rank

    def request(self, space: int, number: int) -> None:
        """Match, load and verify what matched, store the rest."""
        self.tell("request", space=space, document=number)
        try:
            hashes = self.hashes(space, number)
            match = self.load(space, number, hashes)
            if match.blocks < len(hashes):
                self._store(space, number, hashes, min(match.stored_blocks, len(hashes) - 1))
            if seconds := self.orders.take_squat():
                self._squat(space, number, seconds)
        except KVStoreError as error:
            self.tell("refused", kind=type(error).__name__)

    def load(self, space: int, number: int, hashes: Sequence[bytes]) -> Match:
        """Match, and load what matched: every byte is compared."""
        with self.clock.call(self.who, "match", CALL_SECONDS):
            match = self.store.match(self.keys[space], hashes, BLOCK_TOKENS * len(hashes) + 1, store=True)
        if match.blocks:
            came = self._load(space, number, hashes[: match.blocks])
            self.tell("hit", space=space, document=number, blocks=came)
        return match

    def _load(self, space: int, number: int, hashes: Sequence[bytes]) -> int:
        came, dropped = 0, self.orders.take_drop()
        with self.clock.call(self.who, "load", CALL_SECONDS):
            load = self.store.load(self.keys[space], hashes, timeout=LOAD_SECONDS)
        if dropped and self.rng.random() < 0.5:
            _tie(load)
        try:
            batches = iter(load)
            while batch := self._next(batches):
                for block in batch:
                    if block.index != came or block.data != content(hashes[came], block.data.nbytes):
                        self.tell("wrong", space=space, document=number, block=came, announced=block.index)
                    came += 1
                if dropped:
                    break
                time.sleep(self.orders.take_hold())
        finally:
            if not dropped:
                with self.clock.call(self.who, "load_end", LOAD_SECONDS):
                    load.__exit__(None, None, None)
        return came

    def _next(self, batches: Iterator[list[LoadedBlock]]) -> list[LoadedBlock] | None:
        with self.clock.call(self.who, "load_next", LOAD_SECONDS):
            return next(batches, None)

    def _store(self, space: int, number: int, hashes: Sequence[bytes], stored: int) -> None:
        began, wait = time.monotonic(), self.rng.random() < 0.6
        lease, done, tries = 0, stored, 0
        filled: list[bytes] = []
        tickets: list[int] = []
        try:
            while done < len(hashes) and tries < PATIENCE:
                lease, ready = self._reserve(space, hashes, done, lease)
                done += len(ready)
                tickets.append(self._commit(lease, ready, filled, last=done == len(hashes)))
                if not ready:
                    tries += 1
                    time.sleep(0.05)
            sure = wait and done == len(hashes) and bool(tickets) and self._durable(tickets)
        finally:
            if lease:
                with self.clock.call(self.who, "release", CALL_SECONDS):
                    self.store.release(lease)
            names = [block.hex() for block in filled]
            self.tell("stored", space=space, filled=names)
        if sure:
            self.tell("sure", space=space, document=number, began=began, filled=names)

    def store_long(self, space: int, hashes: Sequence[bytes], seconds: float) -> bool:
        """Store a document for at most so many seconds. Whether it is said to be on disk, all of it."""
        until = time.monotonic() + seconds
        lease, done, ticket = 0, 0, 0
        filled: list[bytes] = []
        try:
            while done < len(hashes) and time.monotonic() < until:
                lease, ready = self._reserve(space, hashes, done, lease)
                done += len(ready)
                ticket = self._commit(lease, ready, filled, last=done == len(hashes))
                if not ready:
                    time.sleep(0.02)
            return done == len(hashes) and self._durable([ticket])
        finally:
            if lease:
                self.store.release(lease)
            self.tell("stored", space=space, filled=[block.hex() for block in filled])

    def _reserve(
        self, space: int, hashes: Sequence[bytes], done: int, lease: int
    ) -> tuple[int, list[ReservedBlock]]:
        parent = hashes[done - 1] if done else ROOT
        with self.clock.call(self.who, "reserve", CALL_SECONDS):
            answer = self.store.reserve(self.keys[space], parent, hashes[done : done + RESERVE], lease=lease)
        return answer.lease, list(takewhile(lambda block: block.state not in _LATER, answer.blocks))

    def _commit(self, lease: int, ready: list[ReservedBlock], filled: list[bytes], *, last: bool) -> int:
        fresh = []
        for block in ready:
            if block.data is not None:
                block.data[:] = content(block.hash, block.data.nbytes)
                fresh.append(block.hash)
        marks = [UnitMark(ready[-1].hash, UnitKind.REQUEST_END)] if ready and last else []
        with self.clock.call(self.who, "commit", CALL_SECONDS):
            ticket = self.store.commit(lease, fresh, marks)
        filled += fresh
        return ticket

    def _durable(self, tickets: Sequence[int]) -> bool:
        with self.clock.call(self.who, "durable", DURABLE_SECONDS * len(tickets)):
            return all(self.store.durable(ticket, timeout=DURABLE_SECONDS) for ticket in tickets)

    def _squat(self, space: int, number: int, seconds: float) -> None:
        """Reserve blocks that nobody else knows, fill half of each, and give them up."""
        unknown = block_hashes(self.keys[space], (number, *overlapping(number)))[:RESERVE]
        lease, ready = self._reserve(space, unknown, 0, 0)
        try:
            for block in ready:
                if block.data is not None:
                    block.data[: block.data.nbytes // 2] = bytes(block.data.nbytes // 2)
            time.sleep(seconds)
        finally:
            self.store.release(lease)


def _tie(load: Load) -> None:
    """Only the garbage collector finds that nobody refers to it any more."""
    knot: list[object] = [load]
    knot.append(knot)


def details(**all_of: Any) -> dict[str, Any]:
    """What is told of an event, when it was told included."""
    return {"at": time.monotonic(), **all_of}
