"""A worker as the benchmarks need one: a pool of blocks, and the way between it and a store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import takewhile
from types import TracebackType
from typing import Self

import numpy as np
import torch
import xxhash

import kvstore
from benchmarks.options import BenchmarkError
from kvstore.api import ReservedBlock, ReserveState
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import LatentLayout
from kvstore.namespace import Namespace
from kvstore.units import DEFAULT_INTERVAL, UnitKind, UnitMark
from mla.storing import RESERVE_BLOCKS, RETRY_SECONDS
from mla.transfer import transfer_for

PATIENCE = 120.0  # seconds that one call, or a full arena, may take
_VOCABULARY = 1 << 17
_WIPED = 8  # bytes of each entry


class Worker:
    """A client with a pool ``[layers, blocks, 64, entry bytes]`` of random bytes.

    Blocks go between arena and pool by ``mla.transfer``, as a session's do.
    """

    def __init__(self, url: str, layout: LatentLayout, blocks: int, *, device: str = "cpu") -> None:
        self.layout = layout
        self.blocks = blocks
        self.client = kvstore.connect(url, timeout=PATIENCE)
        self.namespace = b""
        shape = (layout.num_layers, blocks, layout.block_tokens, layout.entry_bytes)
        noise = torch.empty(shape, dtype=torch.uint8)
        noise.view(-1).numpy()[:] = np.frombuffer(np.random.default_rng(0).bytes(noise.numel()), np.uint8)
        self.pool = noise.to(device)
        self._transfer = transfer_for(self.pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def meet(self) -> None:
        """Have a connection and the arena of the daemon, which may be another one since the last time."""
        self.client.status()
        self.namespace = self.client.open_namespace(Namespace(self.layout, model="benchmark"))
        with self.client.load(self.namespace, []) as load:  # maps the arena
            list(load)

    def document(self, seed: int, blocks: int) -> list[bytes]:
        """Hashes of a document of that many blocks, always the same for one seed."""
        tokens = np.random.default_rng(seed).integers(0, _VOCABULARY, blocks * self.layout.block_tokens)
        return block_hashes(self.namespace, tokens, block_tokens=self.layout.block_tokens)

    # --- out of the store

    def load(self, hashes: Sequence[bytes], *, at: int = 0) -> float:
        """Seconds from Match to the last block in the pool, from block ``at`` on (round and round).

        Raises ``BenchmarkError`` if not all of them came.
        """
        started = time.perf_counter()
        # One token more than the blocks: some token is always computed.
        match = self.client.match(self.namespace, hashes, len(hashes) * self.layout.block_tokens + 1)
        loaded = 0
        with self.client.load(self.namespace, hashes[: match.blocks], timeout=PATIENCE) as load:
            for batch in load:
                places = [(at + block.index) % self.blocks for block in batch]
                self._transfer.write(places, [block.data for block in batch])
                loaded += len(batch)
            self._arrived()
            seconds = time.perf_counter() - started
        if loaded != len(hashes):
            raise BenchmarkError(
                f"{loaded} of {len(hashes)} blocks came ({match.blocks} matched); look into the daemon's log"
            )
        return seconds

    def arrivals(self, hashes: Sequence[bytes]) -> list[float]:
        """When each block came into the pool, by ``time.monotonic``."""
        times: list[float] = []
        with self.client.load(self.namespace, hashes, timeout=PATIENCE) as load:
            for batch in load:
                for block in batch:
                    self._transfer.write([block.index % self.blocks], [block.data])
                    times.append(time.monotonic())
        if len(times) != len(hashes):
            raise BenchmarkError(f"{len(times)} of {len(hashes)} blocks came; look into the daemon's log")
        return times

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Load the last block only: the document was used, and is not the next to be evicted."""
        with self.client.load(self.namespace, hashes, first=len(hashes) - 1, timeout=PATIENCE) as load:
            list(load)

    def match_seconds(self, hashes: Sequence[bytes]) -> float:
        """Time of one Match that finds every block."""
        started = time.perf_counter()
        match = self.client.match(self.namespace, hashes, len(hashes) * self.layout.block_tokens + 1)
        seconds = time.perf_counter() - started
        if match.blocks != len(hashes):
            raise BenchmarkError(f"{match.blocks} of {len(hashes)} blocks matched: {match.reason}")
        return seconds

    def _arrived(self) -> None:
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize()

    # --- into the store

    def store(self, hashes: Sequence[bytes]) -> tuple[float, int]:
        """Seconds until all are acknowledged, and the ticket of the last Commit.

        Pool blocks go round and round. Units are left as a session leaves them: one every
        2048 tokens, and one at the end.
        """
        started = time.perf_counter()
        lease, done, ticket = 0, 0, 0
        give_up = started + PATIENCE
        while done < len(hashes):
            parent = hashes[done - 1] if done else ROOT
            part = hashes[done : done + RESERVE_BLOCKS]
            answer = self.client.reserve(self.namespace, parent, part, lease=lease)
            lease = answer.lease
            filled = list(takewhile(_fills, answer.blocks))
            places = [i % self.blocks for i in range(done, done + len(filled))]
            datas = [block.data for block in filled if block.data is not None]
            self._transfer.read(places, datas, self._transfer.mark())
            if filled:
                marks = list(self._marks(hashes, done, done + len(filled)))
                ticket = self.client.commit(lease, [block.hash for block in filled], marks)
                done += len(filled)
                give_up = time.perf_counter() + PATIENCE
            elif time.perf_counter() > give_up:
                raise BenchmarkError(f"no room for block {done} in {PATIENCE} s; look into the daemon's log")
            else:
                time.sleep(RETRY_SECONDS)
        seconds = time.perf_counter() - started
        self.client.release(lease)
        return seconds, ticket

    def _marks(self, hashes: Sequence[bytes], start: int, stop: int) -> list[UnitMark]:
        interval = DEFAULT_INTERVAL // self.layout.block_tokens
        marks = [
            UnitMark(hashes[i - 1], UnitKind.INTERVAL)
            for i in range(start + 1, stop + 1)
            if i % interval == 0
        ]
        if stop == len(hashes):
            marks.append(UnitMark(hashes[-1], UnitKind.REQUEST_END))
        return marks

    def store_durably(self, hashes: Sequence[bytes]) -> float:
        """Seconds until all are on disk. Raises ``BenchmarkError`` if the daemon says that they are not."""
        started = time.perf_counter()
        _, ticket = self.store(hashes)
        if not self.client.durable(ticket, timeout=PATIENCE):
            raise BenchmarkError("the daemon could not write to its disk; look into its log")
        return time.perf_counter() - started

    # --- the pool's bytes

    def fingerprints(self) -> list[int]:
        """xxh3-64 of each block of the pool."""
        block = memoryview(bytearray(self.layout.block_bytes))
        found: list[int] = []
        for i in range(self.blocks):
            self._transfer.read([i], [block], self._transfer.mark())
            found.append(xxhash.xxh3_64_intdigest(block))
        return found

    def wipe(self) -> None:
        """Spoil each entry of the pool, so that what is right afterwards was loaded."""
        self.pool[..., :_WIPED] = 0


def _fills(block: ReservedBlock) -> bool:
    return block.state is ReserveState.FILL
