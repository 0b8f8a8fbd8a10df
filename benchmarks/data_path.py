"""How close do loads and stores come to what the machine can do?

    python -m benchmarks.data_path --layout deepseek-v3 --blocks 256 --payloads slab --json out/run.json

A daemon in its own process and a worker in this one. Each round measures our way and the limit
beside it: raw O_DIRECT reads and writes of the same sizes on the same file system, and memcpy
between shared-memory tensors. Judge the ratios: they are of one moment, and a disk has moods.

cold    from Match to the last block in the worker's pool. Before, the daemon was killed, the page
        cache of its files dropped and the daemon started again: nothing is in its arena.
warm    the same for a document that lies in the arena.
store   from the worker's tensors to the last Commit acknowledged, into the arena of a daemon that
        has just been started.
write   from the first Reserve until the last of more than three arenas of blocks is on disk.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import arguments
from benchmarks.arguments import Parser, machine, workplace, write_json
from benchmarks.data_path_report import figures, table
from benchmarks.data_path_rounds import Course, Plan
from benchmarks.lmcache_peer import LmcachePeer, PeerUnavailable
from benchmarks.pictures import draw_ratios
from kvstore.layout import preset


def main(options: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 2 on bad input."""
    return arguments.run("data_path", lambda: _benchmark(_parse(options), Console()))


def _parse(options: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("data_path", "Loads and stores of a daemon beside the limits of disk and memory.")
    parser.add_layout()
    add = parser.add_argument
    add("--blocks", type=arguments.at_least(1), default=512, metavar="N", help="of the document [512]")
    add("--rounds", type=arguments.at_least(1), default=10, metavar="N", help="interleaved rounds [10]")
    add("--device", default="cpu", help="torch device of the worker's pool [cpu]")
    add("--peers", choices=("lmcache",), action="append", default=[], help="measure these stores too")
    parser.add_plot()
    return parser.parse_args(options)


def _benchmark(options: argparse.Namespace, console: Console) -> None:
    plan = Plan(preset(options.layout), options.blocks, options.payloads, options.arena, options.device)
    with workplace(options.data, plan.disk_need) as place:
        with Course(plan, place) as course:
            rounds = []
            for number in range(options.rounds):
                rounds.append(course.round(number))
                console.print(rounds[-1].line(number + 1), highlight=False)
        peers = {name: _peer(place, plan, options.rounds, console) for name in options.peers}
    about = machine() | plan.about()
    result = figures(rounds, about, peers)
    title = f"{options.layout}, {options.blocks} blocks, {options.payloads}"
    console.print(table(result, title))
    console.print(f"cold: {about['cold_means']}.", highlight=False)
    write_json(options.json, result)
    if options.plot is not None:
        draw_ratios(rounds, options.plot, f"{title}, {about['cpu']}, {about['cores']} cores")


def _peer(place: Path, plan: Plan, rounds: int, console: Console) -> dict[str, Any]:
    try:
        return LmcachePeer(place, plan).measure(rounds, console.print)
    except PeerUnavailable as reason:
        console.print(f"lmcache is skipped: {reason}", style="yellow", highlight=False)
        return {"skipped": str(reason)}


if __name__ == "__main__":
    sys.exit(main())
