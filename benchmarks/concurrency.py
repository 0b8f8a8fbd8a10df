"""Do several workers get what one gets, and each its share?

    python -m benchmarks.concurrency --workers 1,2,4,8 --json out/concurrency.json --plot out/concurrency.png

Worker processes load documents from one daemon, over and over, for some seconds. All documents
together are much larger than its arena and each worker goes round its own part of them, so what is
loaded comes from the disk (the share that does is in the figures). Meanwhile this process asks for
Matches of 2048 blocks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import arguments
from benchmarks.arguments import Parser, machine, workplace, write_json
from benchmarks.crowd import Crowd, Turn
from benchmarks.daemon import Daemon
from benchmarks.data_path_rounds import MATCH_BLOCKS, SMALL
from benchmarks.pictures import draw_lines
from benchmarks.ratios import Ratio
from benchmarks.worker import Worker
from kvstore.layout import LatentLayout, preset

ARENAS = 4  # of documents: enough that a document has left the arena when its turn comes again


@dataclass(frozen=True)
class Load:
    """One number of workers in one round."""

    workers: int
    bytes_per_second: float
    shares: list[float]  # of the total, times the number of workers: 1 is a fair one
    disk_share: float  # of the loaded blocks that were read from disk
    match_seconds: list[float]


def main(options: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 2 on bad input."""
    return arguments.run("concurrency", lambda: _benchmark(_parse(options), Console()))


def _parse(options: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("concurrency", "Loads of several workers at once.", arena="1GiB")
    parser.add_layout()
    add = parser.add_argument
    add("--workers", type=arguments.numbers, default=(1, 2, 4, 8), metavar="N,N", help="processes [1,2,4,8]")
    add("--rounds", type=arguments.at_least(1), default=5, metavar="N", help="interleaved rounds [5]")
    add("--seconds", type=arguments.at_least(1), default=5, metavar="N", help="of each measurement [5]")
    parser.add_plot()
    return parser.parse_args(options)


def _benchmark(options: argparse.Namespace, console: Console) -> None:
    layout = preset(options.layout)
    most = max(options.workers)
    blocks = max(1, ARENAS * options.arena // layout.block_bytes // most)
    stored = most * blocks * layout.block_bytes
    disk = int(stored * 1.3) + (256 << 20)
    flags = [
        *("--host-bytes", str(options.arena), "--disk-bytes", str(disk)),
        *("--payloads", options.payloads),
    ]
    loads: list[Load] = []
    with (
        workplace(options.data, disk + (1 << 30)) as place,
        Daemon(place / "store", flags) as daemon,
        Worker(daemon.url, SMALL, MATCH_BLOCKS) as matcher,
        Crowd(daemon.url, layout, most, blocks) as crowd,
    ):
        matcher.meet()
        matcher.store_durably(matcher.document(0, MATCH_BLOCKS))
        for number in range(options.rounds):
            for workers in options.workers:
                loads.append(_measure(crowd, matcher, layout, workers, options.seconds))
                console.print(_line(number + 1, loads[-1]), highlight=False)
    result = _figures(loads, options, blocks)
    console.print(_table(result))
    write_json(options.json, result)
    if options.plot is not None:
        _draw(result, options.plot)


def _draw(result: dict[str, Any], path: Path) -> None:
    rows, about = result["workers"], result["about"]
    draw_lines(
        {
            "all workers": [row["gbps"] for row in rows],
            "fair share": [row["gbps"] / row["workers"] for row in rows],
            "the worker with the least": [row["least_share"] * row["gbps"] / row["workers"] for row in rows],
        },
        [row["workers"] for row in rows],
        ("workers", "loaded from disk [GB/s]"),
        path,
        "Several workers at once",
        f"{about['layout']}, {about['payloads']}, {about['cpu']}, {about['cores']} cores",
    )


def _measure(crowd: Crowd, matcher: Worker, layout: LatentLayout, workers: int, seconds: float) -> Load:
    document = matcher.document(0, MATCH_BLOCKS)
    matcher.touch(document)
    read = matcher.client.status().counters.get("disk_read_blocks", 0)
    times: list[float] = []
    turns: list[Turn] = crowd.turn(workers, seconds, lambda: times.append(matcher.match_seconds(document)))
    read = matcher.client.status().counters.get("disk_read_blocks", 0) - read
    rates = [turn.blocks * layout.block_bytes / turn.seconds for turn in turns]
    return Load(
        workers=workers,
        bytes_per_second=sum(rates),
        shares=[len(rates) * rate / sum(rates) for rate in rates],
        disk_share=min(1.0, read / sum(turn.all_blocks for turn in turns)),
        match_seconds=times,
    )


def _line(number: int, load: Load) -> str:
    return (
        f"round {number}, {load.workers} workers: {load.bytes_per_second / 1e9:.2f} GB/s,"
        f" least share {min(load.shares):.2f}, {100 * load.disk_share:.0f}% from disk,"
        f" Match {1e3 * median(load.match_seconds):.1f} ms"
    )


def _figures(loads: Sequence[Load], options: argparse.Namespace, blocks: int) -> dict[str, Any]:
    first = [load.bytes_per_second for load in loads if load.workers == options.workers[0]]
    rows = []
    for workers in options.workers:
        own = [load for load in loads if load.workers == workers]
        ratio = Ratio.of([load.bytes_per_second for load in own], first)
        matches = [1e3 * seconds for load in own for seconds in load.match_seconds]
        rows.append(
            {
                "workers": workers,
                "gbps": ratio.value / 1e9,
                "ratio_to_first": ratio.ratio,
                "ratio_to_first_low": ratio.low,
                "least_share": median(min(load.shares) for load in own),
                "disk_share": median(load.disk_share for load in own),
                "match_ms_p50": median(matches),
                "match_ms_p99": float(np.quantile(matches, 0.99)),
                "rounds": [load.bytes_per_second for load in own],
            }
        )
    about = machine() | {
        "layout": options.layout,
        "payloads": options.payloads,
        "arena_bytes": options.arena,
        "document_blocks": blocks,
        "documents": max(options.workers),
        "match_blocks": MATCH_BLOCKS,
    }
    return {"workers": rows, "about": about}


def _table(result: dict[str, Any]) -> Table:
    about = result["about"]
    made = Table(title=f"Loads from disk, {about['layout']}, {about['payloads']}")
    for head in ("workers", "GB/s", "of first", "10% bound", "least share", "from disk", "Match p50", "p99"):
        made.add_column(head, justify="right")
    for row in result["workers"]:
        made.add_row(
            str(row["workers"]),
            f"{row['gbps']:.2f}",
            f"{row['ratio_to_first']:.2f}",
            f"{row['ratio_to_first_low']:.2f}",
            f"{row['least_share']:.2f}",
            f"{100 * row['disk_share']:.0f}%",
            f"{row['match_ms_p50']:.1f} ms",
            f"{row['match_ms_p99']:.1f} ms",
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
