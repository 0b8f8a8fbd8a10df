"""A worker that stores and loads documents which follow from their numbers, with a tick at each step.

In a process of its own: ``python -m tests.crash.loop URL SEED``. Each tick is a line on
standard output; ``sure NUMBER BLOCKS`` says what the store has confirmed to be on disk.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from itertools import takewhile

import kvstore
from kvstore.api import KVStore, ReservedBlock, ReserveState
from kvstore.errors import KVStoreError
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import DType, LatentLayout
from kvstore.namespace import Namespace
from kvstore.testing.chains import overlapping
from kvstore.units import UnitKind, UnitMark

LAYOUT = LatentLayout(num_layers=2, latent_rank=32, rope_dim=16, dtype=DType.FP32)  # 24 KiB a block
_LATER = (ReserveState.RETRY, ReserveState.PENDING)
NAMESPACE = Namespace(LAYOUT, model="crash")


def content(block: bytes) -> bytes:
    """What a block of this hash must hold."""
    return random.Random(block).randbytes(LAYOUT.block_bytes)


class WrongBytes(AssertionError):
    """The store has delivered what nobody stored."""


class Loop:
    """Stores and loads over one store; ``tick`` is called at each step, ``sure`` for what is durable."""

    def __init__(
        self, store: KVStore, seed: int, tick: Callable[[], None], sure: Callable[[int, int], None]
    ) -> None:
        self._store = store
        self._rng = random.Random(seed)
        self._tick = tick
        self._sure = sure
        self._key = store.open_namespace(NAMESPACE)

    def hashes(self, number: int) -> list[bytes]:
        return block_hashes(self._key, overlapping(number))

    def store(self, number: int) -> None:
        """Store a document in pieces, a unit behind some of them, waiting for the disk now and then."""
        hashes = self.hashes(number)
        done, lease = 0, 0
        tickets: list[int] = []
        try:
            while done < len(hashes):
                piece = hashes[done : done + self._rng.randint(1, 8)]
                parent = hashes[done - 1] if done else ROOT
                answer = self._store.reserve(self._key, parent, piece, lease=lease)
                lease = answer.lease
                self._tick()
                # Up to the first that must wait for room, or for another worker.
                stored = list(takewhile(lambda block: block.state not in _LATER, answer.blocks))
                done += len(stored)
                last = done == len(hashes)
                ends = stored and (last or self._rng.random() < 0.5)
                marks = [UnitMark(stored[-1].hash, UnitKind.REQUEST_END)] if ends else []
                tickets.append(self._store.commit(lease, self._fill(stored), marks))
                self._tick()
                if last or not stored or self._rng.random() < 0.5:
                    if all(self._store.durable(ticket) for ticket in tickets) and ends:
                        self._sure(number, done)
                    self._tick()
        finally:
            with contextlib.suppress(KVStoreError):
                self._store.release(lease)

    def _fill(self, blocks: list[ReservedBlock]) -> list[bytes]:
        filled = []
        for block in blocks:
            if block.data is not None:
                half = LAYOUT.block_bytes // 2
                block.data[:half] = content(block.hash)[:half]
                self._tick()  # with half a block written
                block.data[half:] = content(block.hash)[half:]
                filled.append(block.hash)
        return filled

    def load(self, number: int) -> int:
        """Load what matches and verify each byte; how many blocks came."""
        hashes = self.hashes(number)
        match = self._store.match(self._key, hashes, 64 * len(hashes) + 1)
        came = 0
        with self._store.load(self._key, hashes[: match.blocks]) as load:
            for batch in load:
                for block in batch:
                    if block.index != came or block.data != content(hashes[came]):
                        raise WrongBytes(f"document {number}, block {came}, announced as {block.index}")
                    came += 1
                self._tick()
        return came


def main(url: str, seed: int) -> None:
    def tell(*words: object) -> None:
        print(*words, flush=True)

    with contextlib.closing(kvstore.connect(url, timeout=30)) as client:
        loop = Loop(client, seed, lambda: tell("tick"), lambda *what: tell("sure", *what))
        for number in range(seed * 1000, seed * 1000 + 1000):
            loop.store(number)
            loop.load(number)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
