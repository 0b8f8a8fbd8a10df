"""Does the real store hit what ``latentkv plan`` says? A trace through both, blocks of 16 bytes."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import kvstore
from kvstore.api import KVStore, ReserveState
from kvstore.hashing import ROOT
from kvstore.layout import DType, LatentLayout
from kvstore.namespace import Namespace
from kvstore.units import UnitKind, UnitMark
from server.planning.replay import Replay
from server.planning.trace import Request, Trace, read_trace

LAYOUT = LatentLayout(num_layers=1, latent_rank=1, rope_dim=0, dtype=DType.FP8, block_tokens=16)
STORED_BYTES = 4096  # of one such block on disk, in slabs
_SETTLE = 8  # requests; what waits to be written is held beside the disk
_PART = 1024  # blocks in one reservation, well below half of the arena


@dataclass(frozen=True, slots=True)
class Compared:
    """One size: hit rates of the store and of the plan at the blocks that the store really held."""

    blocks: int
    store: float
    plan: float
    seconds: float


def disk_bytes(blocks: int) -> int:
    """A size of the DISK tier that holds about so many blocks."""
    payloads = (blocks + 64) * STORED_BYTES * 32 // 31
    return max(payloads * 32 // 31 + (1 << 20), payloads + (4 << 20), 16 << 20)


class StoreReplay:
    """A real store that is asked for, and given, the blocks of a trace."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._namespace = store.open_namespace(Namespace(LAYOUT, model="trace"))
        self._ticket = 0
        self.asked = self.hits = self.most = 0

    def request(self, request: Request) -> None:
        """Match, load what hits, and store the rest."""
        hashes = [block.to_bytes(32, "big") for block in request.blocks]
        tokens = len(hashes) * LAYOUT.block_tokens + 1
        match = self._store.match(self._namespace, hashes, tokens, align=LAYOUT.block_tokens)
        self.asked += len(hashes)
        self.hits += match.blocks
        for first in range(0, len(hashes), _PART):
            self._put(hashes[first - 1] if first else ROOT, hashes[first : first + _PART])

    def _put(self, parent: bytes, hashes: list[bytes]) -> None:
        lease, left = 0, hashes
        while left:
            answer = self._store.reserve(self._namespace, parent, left, lease=lease)
            lease, given = answer.lease, len(left) - answer.retry
            filled = [block for block in answer.blocks if block.state is ReserveState.FILL]
            for block in filled:
                assert block.data is not None
                block.data[:] = block.hash[-LAYOUT.block_bytes :]
            if given:
                parent, left = left[given - 1], left[given:]
                end = [] if left else [UnitMark(hashes[-1], UnitKind.REQUEST_END)]
                self._ticket = self._store.commit(lease, [block.hash for block in filled], end)
            if left:
                self.settle()
        self._store.release(lease)

    def settle(self) -> None:
        """Wait until the arena has room: what was committed is on disk."""
        if self._ticket:
            self._store.durable(self._ticket)
        self.most = max(self.most, self._store.status().disk.blocks)


def compare(trace: Trace, blocks: int, directory: Path) -> Compared:
    """Both at about so many blocks, policy ``block``."""
    began = time.monotonic()
    settings = {
        "policy": "block",
        "payloads": "slab",
        "host_bytes": 16 << 20,
        "disk_bytes": disk_bytes(blocks),
    }
    with kvstore.open(directory, **settings) as store:
        replay = StoreReplay(store)
        for number, request in enumerate(trace.requests):
            replay.request(request)
            if number % _SETTLE == 0:
                replay.settle()
        replay.settle()
    held = replay.most
    plan = Replay(held, "block", 0).run(trace)
    return Compared(held, replay.hits / replay.asked, plan.hit_rate, time.monotonic() - began)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(prog="trace_replay", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--shares", default="1,5,10", help="sizes in percent of the distinct blocks [1,5,10]")
    parser.add_argument("--requests", type=int, default=0, help="only so many of the trace [all]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args(arguments)
    trace = read_trace(given.trace)
    if given.requests:
        trace = Trace(trace.block_tokens, trace.requests[: given.requests])
    found = []
    print("  blocks   store    plan  points  seconds")
    for share in map(float, given.shares.split(",")):
        with tempfile.TemporaryDirectory(prefix="latentkv-") as directory:
            each = compare(trace, int(share / 100 * trace.distinct_blocks), Path(directory))
        found.append(each)
        points = 100 * (each.store - each.plan)
        print(f"{each.blocks:>8,} {each.store:7.4f} {each.plan:7.4f} {points:7.2f} {each.seconds:8.1f}")
    if given.json:
        given.json.write_text(json.dumps([asdict(each) for each in found], indent=1))


if __name__ == "__main__":
    main()
