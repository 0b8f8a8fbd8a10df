"""Small stores, and what their tests do with them from inside the loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from kvstore.api import ReserveState
from kvstore.clock import Clock
from kvstore.embedded import Embedded
from kvstore.hashing import ROOT
from kvstore.leases import Holder
from kvstore.payloads.kinds import OPEN
from kvstore.settings import MIB, PayloadKind, StoreSettings
from kvstore.store import Store
from kvstore.testing.chains import (
    DEADLINE,
    OTHER,
    RESERVE,
    SMALL,
    Conversation,
    content,
    end_of,
    hit,
    load_chain,
    store_chain,
    stored_again,
    tokens,
)
from kvstore.testing.clocks import SteppedClock
from kvstore.testing.faults import Faults

__all__ = [
    "DEADLINE",
    "OTHER",
    "RESERVE",
    "SMALL",
    "Conversation",
    "content",
    "end_of",
    "hit",
    "load_chain",
    "store_chain",
    "stored_again",
    "tokens",
]

DAY = 86400.0
CHOSEN: dict[str, PayloadKind] = {"payloads": "lmdb"}  # by the fixture ``payload_kind``


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in a loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def settings(path: Path, **changes: Any) -> StoreSettings:
    """A small store in ``path``: 85 SMALL blocks in HOST, about a thousand on DISK."""
    small: dict[str, Any] = {
        "host_bytes": MIB,
        "disk_bytes": 16 * MIB,
        "interval": 0,
        "lease_seconds": 3600.0,
    }
    return StoreSettings(data=path, **(small | CHOSEN | changes))


def later(seconds: float) -> SteppedClock:
    """A clock that shows what those of the machine will show after so many seconds."""
    clock = SteppedClock()
    clock.passed = seconds
    return clock


def faulty() -> Faults:
    """Payloads of the kind under test that fail on demand."""
    return Faults(OPEN[CHOSEN["payloads"]])


def open_store(
    path: Path, faults: Faults | None = None, clock: Clock | None = None, **changes: Any
) -> Embedded:
    """A small embedded store, over failing payloads if asked."""
    return Embedded(settings(path, **changes), (faults or faulty()).open, clock)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something has come about."""
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.001)


async def fill(
    store: Store, holder: Holder, namespace: bytes, hashes: Sequence[bytes], parent: bytes = ROOT
) -> int:
    """Reserve a chain with a new lease and write its bytes; the lease."""
    reserved = store.reserve(holder, namespace, parent, hashes, 0)
    assert set(reserved.states) == {ReserveState.FILL}
    nbytes = store.space(namespace).block_bytes
    for block, offset in zip(hashes, reserved.offsets, strict=True):
        store.arena.memory[offset : offset + nbytes] = content(block, nbytes)
    return reserved.lease


async def put(
    store: Store, holder: Holder, namespace: bytes, hashes: Sequence[bytes], parent: bytes = ROOT
) -> int:
    """Store a chain with a unit at its end and end its lease; the ticket."""
    lease = await fill(store, holder, namespace, hashes, parent)
    ticket = store.commit(holder, lease, hashes, end_of(hashes))
    store.release(holder, lease)
    return ticket
