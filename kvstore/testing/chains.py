"""Chains of blocks whose bytes follow from their hashes, so that every loaded byte can be checked."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from kvstore.api import KVStore, Match, ReserveState
from kvstore.errors import NotReserved, ParentMissing
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import BLOCK_TOKENS, DType, LatentLayout
from kvstore.namespace import Namespace
from kvstore.units import UnitKind, UnitMark

SMALL = LatentLayout(num_layers=2, latent_rank=32, rope_dim=14)  # 11,776 bytes, and a page is left in no slot
OTHER = LatentLayout(num_layers=3, latent_rank=32, rope_dim=16, dtype=DType.FP32)  # 36,864 bytes
RESERVE = 8  # blocks in one Reserve
DEADLINE = 30.0  # seconds after which a test has failed; nothing is timed by it


def content(block: bytes, nbytes: int, *, compressible: bool = False) -> bytes:
    """The bytes of a block with this hash."""
    seed = int.from_bytes(hashlib.blake2b(block, digest_size=8).digest(), "little")
    high = 16 if compressible else 256
    return np.random.default_rng(seed).integers(0, high, nbytes, dtype=np.uint8).tobytes()


def tokens(seed: int, blocks: int) -> list[int]:
    """Token ids that fill so many blocks; other seeds have other ids."""
    ids: list[int] = np.random.default_rng(seed).integers(0, 1 << 30, BLOCK_TOKENS * blocks).tolist()
    return ids


@functools.cache
def overlapping(number: int) -> tuple[int, ...]:
    """Token ids of 1 to 28 whole blocks. Every other number starts like an earlier one, up to some block."""
    rng = random.Random(number)
    shared: tuple[int, ...] = ()
    if number and rng.random() < 0.5:
        earlier = overlapping(rng.randrange(number))
        shared = earlier[: BLOCK_TOKENS * rng.randint(1, len(earlier) // BLOCK_TOKENS)][: BLOCK_TOKENS * 16]
    return shared + tuple(rng.randrange(1 << 32) for _ in range(BLOCK_TOKENS * rng.randint(1, 12)))


def end_of(hashes: Sequence[bytes], kinds: UnitKind = UnitKind.REQUEST_END) -> list[UnitMark]:
    """A mark on the last block."""
    return [UnitMark(hashes[-1], kinds)]


def store_chain(
    store: KVStore,
    namespace: bytes,
    hashes: Sequence[bytes],
    marks: Iterable[UnitMark] | None = None,
    *,
    nbytes: int = SMALL.block_bytes,
    durable: bool = True,
    compressible: bool = False,
) -> bool:
    """Store what of a chain is not stored, with a unit at its end unless others are named.

    Marks are made with the commit of their block. The answer of ``durable``.
    """
    units = {mark.hash: mark for mark in (end_of(hashes) if marks is None else marks)}
    lease = store.reserve(namespace, ROOT, []).lease
    try:
        tickets = _store_pieces(store, namespace, hashes, units, lease, nbytes, compressible)
        sure = [store.durable(ticket, timeout=DEADLINE) for ticket in tickets] if durable else [True]
    finally:
        # Also when a commit is refused: what it reserved would be pending for all others, and for ever.
        store.release(lease)
    return all(sure)


def _store_pieces(
    store: KVStore,
    namespace: bytes,
    hashes: Sequence[bytes],
    units: Mapping[bytes, UnitMark],
    lease: int,
    nbytes: int,
    compressible: bool,
) -> list[int]:
    """Reserve, fill and commit piece by piece; the tickets."""
    parent, done, tickets = ROOT, 0, list[int]()
    while done < len(hashes):
        answer = store.reserve(namespace, parent, hashes[done : done + RESERVE], lease=lease)
        moved = answer.blocks[: len(answer.blocks) - answer.retry]
        filled = [block for block in moved if block.state is ReserveState.FILL]
        for block in filled:
            assert block.data is not None
            block.data[:] = content(block.hash, nbytes, compressible=compressible)
        marked = [units[block.hash] for block in moved if block.hash in units]
        tickets.append(store.commit(lease, [block.hash for block in filled], marked))
        done += len(moved)
        parent = hashes[done - 1] if done else ROOT
        if not moved:  # the arena is full of unwritten blocks: they are on their way to the disk
            store.durable(tickets[-1] if len(tickets) < 2 else tickets[-2], timeout=DEADLINE)
    return tickets


def load_chain(
    store: KVStore, namespace: bytes, hashes: Sequence[bytes], first: int = 0, *, compressible: bool = False
) -> int:
    """Load a chain; checks every byte that comes, and that blocks come in order. How many leading
    hashes are usable.
    """
    reached = first
    with store.load(namespace, hashes, first=first, timeout=DEADLINE) as load:
        for batch in load:
            for block in batch:
                assert block.index == reached
                reached += 1
                expected = content(hashes[block.index], block.data.nbytes, compressible=compressible)
                assert block.data == expected, f"block {block.index} has wrong bytes"
        short = load.short
    assert short is None or short <= reached
    return len(hashes) if short is None else short


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something has come about that happens in the background."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        gc.collect()
        time.sleep(0.01)


def stored_again(store: KVStore, namespace: bytes, hashes: Sequence[bytes]) -> bool:
    """Store a chain of which blocks may still be found missing meanwhile, until all of it is there."""
    for _ in range(100):
        # A refused commit changes nothing, and the worker starts anew.
        with contextlib.suppress(NotReserved, ParentMissing):
            if store_chain(store, namespace, hashes) and load_chain(store, namespace, hashes) == len(hashes):
                return True
    return False


def hit(store: KVStore, namespace: bytes, prompt: Sequence[int]) -> int:
    """Tokens that a prompt hits, all loaded and checked."""
    hashes = block_hashes(namespace, prompt)
    match = store.match(namespace, hashes, len(prompt))
    assert load_chain(store, namespace, hashes[: match.blocks]) == match.blocks
    return BLOCK_TOKENS * match.blocks


class Conversation:
    """A worker that serves requests: matches, loads what it can, stores the rest, obeys persist points."""

    def __init__(self, store: KVStore, layout: LatentLayout = SMALL, salt: str = "") -> None:
        self.store = store
        self.layout = layout
        self.namespace = store.open_namespace(Namespace(layout=layout, salt=salt))

    def match(self, prompt: Sequence[int]) -> Match:
        """How much of a prompt could be loaded."""
        return self.store.match(self.namespace, block_hashes(self.namespace, prompt), len(prompt))

    def request(self, prompt: Sequence[int]) -> int:
        """Serve a prompt without an answer; the tokens that it hit."""
        hashes = block_hashes(self.namespace, prompt)
        match = self.store.match(self.namespace, hashes, len(prompt), store=True)
        usable = load_chain(self.store, self.namespace, hashes[: match.blocks])
        assert usable == match.blocks
        points = [(point.tokens // BLOCK_TOKENS, point.kinds) for point in match.persist_points]
        marks = [UnitMark(hashes[depth - 1], kinds) for depth, kinds in points]
        if hashes:
            nbytes = self.layout.block_bytes
            assert store_chain(self.store, self.namespace, hashes, marks, nbytes=nbytes)
        return BLOCK_TOKENS * match.blocks
