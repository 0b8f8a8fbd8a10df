"""Bringing a prompt's cached prefix into the device pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.api import KVStore, Load, LoadedBlock, Tier
from kvstore.errors import CorruptBlock
from mla.pool import LatentPool


@dataclass(frozen=True, slots=True)
class Prefix:
    """Filled pool blocks, one reference each, and the tier that each came from, counted.

    ``short`` if a load brought less than was matched.
    """

    blocks: list[int]
    by_tier: dict[Tier, int]  # blocks
    short: bool = False


class PrefixLoader:
    """Takes what the pool has, and loads the rest of a match from the store behind it.

    The pool is the worker's own prefix cache and hits at any block; units govern the store.
    """

    def __init__(self, pool: LatentPool, *, align: int, timeout: float) -> None:
        self._pool = pool
        self._align = align // pool.layout.block_tokens  # in blocks
        self._timeout = timeout

    def take(self, hashes: Sequence[bytes]) -> list[int]:
        """Leading blocks out of the pool, with a reference each, at most ``hashes``."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._pool.acquire(block_hash)
            if block is None:
                break
            blocks.append(block)
        return self._round(blocks)

    def load(
        self, store: KVStore, namespace: bytes, hashes: Sequence[bytes], taken: list[int], disk_blocks: int
    ) -> Prefix:
        """Load ``hashes[len(taken):]`` behind the blocks taken from the pool.

        ``disk_blocks`` of all ``hashes`` were matched on DISK.

        A load that falls short ends the prefix at the deepest whole, aligned block.
        Raises what the store raises, and ``PoolFull``; then ``taken`` is all there is and
        nothing else is kept.
        """
        first = len(taken)
        fresh = self._pool.allocate(len(hashes) - first)
        try:
            with store.load(namespace, hashes, first=first, timeout=self._timeout) as load:
                loaded = self._fill(fresh, load, first)
        except BaseException:
            self._pool.release(fresh)
            raise
        for block, block_hash in zip(fresh[:loaded], hashes[first:], strict=False):
            self._pool.register(block, block_hash, namespace)
        self._pool.release(fresh[loaded:])
        blocks = self._round(taken + fresh[:loaded])
        return Prefix(blocks, _tiers(len(blocks), first, disk_blocks))

    def _fill(self, fresh: Sequence[int], load: Load, first: int) -> int:
        loaded = 0
        for batch in load:
            places = fresh[loaded : loaded + len(batch)]
            check_order(batch, first + loaded)
            self._pool.write_blocks(places, [block.data for block in batch])
            loaded += len(batch)
        return loaded

    def _round(self, blocks: list[int]) -> list[int]:
        keep = len(blocks) - len(blocks) % self._align
        self._pool.release(blocks[keep:])
        return blocks[:keep]


def check_order(batch: Sequence[LoadedBlock], expected: int) -> None:
    """Raise ``CorruptBlock`` unless a batch holds the blocks from ``expected`` on, in their order.

    A block in another's place would be a wrong answer that nothing else can see.
    """
    if [block.index for block in batch] != list(range(expected, expected + len(batch))):
        raise CorruptBlock(f"the store sent {[block.index for block in batch]} where {expected} was next")


def _tiers(blocks: int, device: int, disk_blocks: int) -> dict[Tier, int]:
    loaded = blocks - device
    # Which of the loaded ones were in the arena is known as a sum over the whole match only.
    disk = min(loaded, disk_blocks)
    return {Tier.DEVICE: device, Tier.HOST: loaded - disk, Tier.DISK: disk}
