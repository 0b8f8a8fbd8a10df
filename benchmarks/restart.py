"""How long is a daemon away when it restarts?

    python -m benchmarks.restart --blocks 220000 --json out/restart.json

Makes a catalogue of that many blocks (220,000 of DeepSeek-V3 are a terabyte) with units as sessions
leave them, over payloads of a few bytes each, since only their number counts here. Then starts a
daemon on it: the time from the start of the process to the first Match answered, in full, and the
memory that it has then.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import arguments, page_cache
from benchmarks.arguments import Parser, machine, workplace, write_json
from benchmarks.daemon import Daemon
from benchmarks.data_path_rounds import MATCH_BLOCKS
from benchmarks.memory import cpu_seconds, private_bytes
from benchmarks.worker import Worker
from kvstore.catalog import UnitRecord
from kvstore.disk import DiskTier, NewBlock
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import DType, LatentLayout
from kvstore.namespace import Namespace
from kvstore.payloads.direct import Run
from kvstore.settings import StoreSettings
from kvstore.units import plan_input

LAYOUT = LatentLayout(num_layers=1, latent_rank=1, rope_dim=0, dtype=DType.FP8)  # 64 bytes a block
INTERVAL = 2048  # tokens between units
CATALOGUE_BYTES_A_BLOCK = 1024  # room for the record and for LMDB's trees


class Catalogue:
    """A data directory with documents of up to 2048 blocks each."""

    def __init__(self, path: Path, blocks: int, payloads: str) -> None:
        page = 4096 if payloads == "slab" else 256
        self.disk_bytes = 32 * max(blocks * CATALOGUE_BYTES_A_BLOCK, blocks * page // 16) + (64 << 20)
        self._blocks = blocks
        settings = StoreSettings(
            path, disk_bytes=self.disk_bytes, payloads="slab" if payloads == "slab" else "lmdb"
        )
        self._disk = DiskTier(settings)
        found = self._disk.add_namespace(Namespace(LAYOUT, model="benchmark"))
        self._namespace, self._digest = found.number, found.digest

    def write(self) -> None:
        """Make it, and close it."""
        data = Run.of(self._disk.lead, bytes(LAYOUT.block_bytes))
        for hashes in track(list(self._documents()), "writing the catalogue"):
            parents = itertools.chain([ROOT], hashes)
            now = time.time()
            blocks = [
                NewBlock(block, parent, self._namespace, depth, now, data)
                for depth, (block, parent) in enumerate(zip(hashes, parents, strict=False), 1)
            ]
            self._disk.write(LAYOUT, blocks, list(self._units(hashes, now)))
        self._disk.close()

    def _documents(self) -> Iterator[list[bytes]]:
        for number, start in enumerate(range(0, self._blocks, MATCH_BLOCKS)):
            length = min(MATCH_BLOCKS, self._blocks - start)
            yield block_hashes(self._digest, [number] * (length * LAYOUT.block_tokens))

    def _units(self, hashes: Sequence[bytes], now: float) -> Iterator[UnitRecord]:
        for point in plan_input(len(hashes) * LAYOUT.block_tokens, interval=INTERVAL):
            last = hashes[point.tokens // LAYOUT.block_tokens - 1]
            yield UnitRecord(last, self._namespace, point.tokens, int(point.kinds), now, now, 0)


def main(options: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 2 on bad input."""
    return arguments.run("restart", lambda: _benchmark(_parse(options), Console()))


def _parse(options: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("restart", "From the start of a daemon to its first answer.", arena="1GiB")
    add = parser.add_argument
    add("--blocks", type=arguments.at_least(MATCH_BLOCKS), default=220_000, metavar="N", help="[220000]")
    add("--rounds", type=arguments.at_least(1), default=5, metavar="N", help="starts of each kind [5]")
    return parser.parse_args(options)


def _benchmark(options: argparse.Namespace, console: Console) -> None:
    starts: dict[str, list[dict[str, float]]] = {"empty": [], "cached": [], "cold": []}
    with workplace(options.data, options.blocks * 8192 + (1 << 30)) as place:
        catalogue = Catalogue(place / "full", options.blocks, options.payloads)
        catalogue.write()
        flags = [
            *("--host-bytes", str(options.arena), "--disk-bytes", str(catalogue.disk_bytes)),
            *("--payloads", options.payloads),
        ]
        for _ in range(options.rounds):
            starts["empty"].append(_start(place / "empty", flags, 0))
            starts["cached"].append(_start(place / "full", flags, MATCH_BLOCKS))
            page_cache.drop(place / "full")
            starts["cold"].append(_start(place / "full", flags, MATCH_BLOCKS))
    about = machine() | {"blocks": options.blocks, "payloads": options.payloads, "arena_bytes": options.arena}
    result: dict[str, Any] = {
        "about": about,
        "first_match_seconds": _middle(starts["cached"], "seconds"),
        "first_match_cold_seconds": _middle(starts["cold"], "seconds"),
        "empty_seconds": _middle(starts["empty"], "seconds"),
        "rss_bytes": max(start["rss_bytes"] for start in (*starts["cached"], *starts["cold"])),
        "empty_rss_bytes": max(start["rss_bytes"] for start in starts["empty"]),
        "starts": starts,
    }
    console.print(_table(result))
    write_json(options.json, result)


def _start(data: Path, flags: Sequence[str], blocks: int) -> dict[str, float]:
    """Start a daemon, ask it, kill it."""
    started = time.perf_counter()
    with Daemon(data, flags) as daemon, Worker(daemon.url, LAYOUT, 1) as worker:
        worker.meet()
        if blocks:
            worker.match_seconds(block_hashes(worker.namespace, [0] * (blocks * LAYOUT.block_tokens)))
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds(daemon.pid),
            "rss_bytes": private_bytes(daemon.pid),
        }


def _middle(starts: Sequence[dict[str, float]], name: str) -> float:
    return median(start[name] for start in starts)


def _table(result: dict[str, Any]) -> Table:
    made = Table(title=f"Start of a daemon, {result['about']['payloads']}")
    for head in ("", "first Match answered", "CPU of the daemon", "memory without arena"):
        made.add_column(head, justify="right")
    blocks = f"{result['about']['blocks']:,} blocks"
    names = {
        "empty": "nothing stored",
        "cached": f"{blocks}, files in the page cache",
        "cold": f"{blocks}, files dropped from it",
    }
    for kind, name in names.items():
        starts = result["starts"][kind]
        made.add_row(
            name,
            f"{_middle(starts, 'seconds'):.2f} s",
            f"{_middle(starts, 'cpu_seconds'):.2f} s",
            f"{max(start['rss_bytes'] for start in starts) / 1e6:.0f} MB",
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
