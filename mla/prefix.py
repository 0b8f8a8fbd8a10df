"""Bringing a prompt's cached prefix into the device pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.api import KVStore, Match, Tier
from mla.pool import LatentPool


@dataclass(frozen=True, slots=True)
class Prefix:
    """Filled pool blocks, one reference each, and the tier that each came from, counted."""

    blocks: list[int]
    by_tier: dict[Tier, int]  # blocks


class PrefixLoader:
    """Takes what the pool has, and loads the rest of a match from the store behind it.

    The pool is the worker's own prefix cache and hits at any block; units govern the store.
    """

    def __init__(self, pool: LatentPool, *, align: int, timeout: float) -> None:
        self._pool = pool
        self._align = align // pool.layout.block_tokens  # in blocks
        self._timeout = timeout

    def device_run(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks that the pool has, rounded down to the alignment."""
        run = self._pool.lookup_run(hashes)
        return run - run % self._align

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
        self, store: KVStore, namespace: bytes, hashes: Sequence[bytes], taken: list[int], match: Match
    ) -> Prefix:
        """Load ``hashes[len(taken):match.blocks]`` behind the blocks taken from the pool.

        A load that falls short ends the prefix at the deepest whole, aligned block.
        Raises what the store raises, and ``PoolFull``; then ``taken`` is all there is and
        nothing else is kept.
        """
        first = len(taken)
        fresh = self._pool.allocate(match.blocks - first)
        try:
            with store.load(namespace, hashes[: match.blocks], first=first, timeout=self._timeout) as load:
                loaded = 0
                for batch in load:
                    self._pool.write_blocks(
                        [fresh[block.index - first] for block in batch], [block.data for block in batch]
                    )
                    loaded += len(batch)
        except BaseException:
            self._pool.release(fresh)
            raise
        for block, block_hash in zip(fresh[:loaded], hashes[first:], strict=False):
            self._pool.register(block, block_hash)
        self._pool.release(fresh[loaded:])
        blocks = self._round(taken + fresh[:loaded])
        return Prefix(blocks, _tiers(blocks, first, match))

    def _round(self, blocks: list[int]) -> list[int]:
        keep = len(blocks) - len(blocks) % self._align
        self._pool.release(blocks[keep:])
        return blocks[:keep]


def _tiers(blocks: list[int], device: int, match: Match) -> dict[Tier, int]:
    device = min(device, len(blocks))
    loaded = len(blocks) - device
    # Which of the loaded ones were in the arena is known as a sum over the whole match only.
    disk = min(loaded, match.disk_blocks)
    return {Tier.DEVICE: device, Tier.HOST: loaded - disk, Tier.DISK: disk}
