"""Does a full disk get slower with time?

    python -m benchmarks.churn --payloads lmdb --disk 4GiB --json out/churn.json --plot out/churn.png

Fills the disk tier to 90% and then replaces all of it, turnover by turnover: random blocks leave,
new ones come. Once with one layout, once with several of different sizes mixed. No daemon and no arena:
catalogue and payloads alone, in this process. Raw O_DIRECT writes are measured in between, since
a disk has moods; judge a turnover by its share of them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import arguments
from benchmarks.arguments import Parser, machine, workplace, write_json
from benchmarks.limits import RawDisk
from benchmarks.pictures import draw_lines
from kvstore.disk import DiskTier, Freed, NewBlock
from kvstore.hashing import HASH_BYTES, ROOT
from kvstore.layout import LatentLayout, preset
from kvstore.namespace import Namespace
from kvstore.payloads.direct import Run
from kvstore.settings import StoreSettings

FILL = 0.9
MIXED = ("deepseek-v3", "deepseek-v2-lite", "tiny")
RAW_BLOCKS = 48
RAW_DEPTH = 4
RAW_SAMPLES = 4  # a turnover
MIB = 1 << 20


@dataclass
class Turnover:
    """As many bytes as the disk holds, written once. Turnover 0 is the first filling."""

    raw: list[float] = field(default_factory=list)  # bytes a second of raw writes in between
    nbytes: int = 0
    write_seconds: float = 0.0
    drop_seconds: float = 0.0
    cpu: list[float] = field(default_factory=list)  # seconds a MiB, for each batch

    def figures(self, number: int) -> dict[str, Any]:
        """What is shown of it."""
        rate = self.nbytes / (self.write_seconds + self.drop_seconds)
        return {
            "turnover": number,
            "gbps": rate / 1e9,
            "raw_gbps": median(self.raw) / 1e9,
            "ratio": rate / median(self.raw),
            "drop_share": self.drop_seconds / (self.write_seconds + self.drop_seconds),
            "cpu_ms_per_mib_p50": 1e3 * median(self.cpu),
            "cpu_ms_per_mib_max": 1e3 * max(self.cpu),
        }


@dataclass(frozen=True)
class _Kind:
    layout: LatentLayout
    namespace: int
    memory: list[Run]  # of one batch


class Churn:
    """A disk tier kept at 90%, one batch after the other in and as much out before."""

    def __init__(self, disk: DiskTier, layouts: Sequence[LatentLayout]) -> None:
        self._disk = disk
        self._random = random.Random(0)
        self._kinds = [self._kind(layout) for layout in layouts]
        self._live: list[tuple[Freed, int]] = []  # and its bytes on disk
        self._used = 0
        self._limit = int(FILL * min(disk.limit_bytes(layout.block_bytes) for layout in layouts))

    def _kind(self, layout: LatentLayout) -> _Kind:
        namespace = self._disk.add_namespace(Namespace(layout, model="benchmark")).number
        memory = [
            Run.fresh(self._disk.lead, layout.block_bytes)
            for _ in range(self._disk.batch_blocks(layout.block_bytes))
        ]
        noise = np.random.default_rng(0)
        for run in memory:
            run.payload[:] = noise.bytes(layout.block_bytes)
        return _Kind(layout, namespace, memory)

    @property
    def capacity(self) -> int:
        """Bytes of one turnover."""
        return self._limit

    def turnover(self, raw: RawDisk) -> Turnover:
        """Write as many bytes as are kept."""
        found = Turnover()
        measured = 0
        while found.nbytes < self._limit:
            if found.nbytes >= measured * self._limit // RAW_SAMPLES:
                found.raw.append(raw.write(RAW_DEPTH))
                measured += 1
            self._step(found)
        return found

    def _step(self, found: Turnover) -> None:
        # By bytes and not by blocks, all sizes come alike.
        kind = self._random.choices(self._kinds, [1 / self._batch_bytes(kind) for kind in self._kinds])[0]
        need = self._batch_bytes(kind)
        started = time.perf_counter()
        if going := list(self._victims(need)):
            self._disk.drop(going)
        found.drop_seconds += time.perf_counter() - started
        blocks = [
            NewBlock(self._random.randbytes(HASH_BYTES), ROOT, kind.namespace, 1, time.time(), run)
            for run in kind.memory
        ]
        started, cpu = time.perf_counter(), time.thread_time()
        stored = self._disk.write(kind.layout, blocks, ())
        found.write_seconds += time.perf_counter() - started
        found.cpu.append((time.thread_time() - cpu) / (need / MIB))
        found.nbytes += need
        size = kind.layout.block_bytes
        for block, at in zip(blocks, stored, strict=True):
            self._live.append(
                (Freed(block.hash, size, at.place.key), self._disk.stored_bytes(size, at.length))
            )
        self._used += need

    def _batch_bytes(self, kind: _Kind) -> int:
        size = kind.layout.block_bytes
        return len(kind.memory) * self._disk.stored_bytes(size, size)

    def _victims(self, need: int) -> Iterator[Freed]:
        while self._used + need > self._limit:
            at = self._random.randrange(len(self._live))
            self._live[at], self._live[-1] = self._live[-1], self._live[at]
            freed, nbytes = self._live.pop()
            self._used -= nbytes
            yield freed


def main(options: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 2 on bad input."""
    return arguments.run("churn", lambda: _benchmark(_parse(options), Console()))


def _parse(options: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("churn", "Writes to a disk that stays nine tenths full.")
    parser.add_layout()
    add = parser.add_argument
    add("--disk", type=arguments.size, default=arguments.size("4GiB"), help="of the disk tier [4GiB]")
    add(
        "--turnovers",
        type=arguments.at_least(2),
        default=10,
        metavar="N",
        help="after the first filling [10]",
    )
    parser.add_plot()
    return parser.parse_args(options)


def _benchmark(options: argparse.Namespace, console: Console) -> None:
    cases = {"one": [options.layout], "mixed": list(MIXED)}
    result: dict[str, Any] = {
        "about": machine()
        | {"payloads": options.payloads, "disk_bytes": options.disk, "fill": FILL, "layouts": cases}
    }
    for name, layouts in cases.items():
        with workplace(options.data, int(options.disk * 1.1) + (1 << 30)) as place:
            rows = list(_turnovers(place, options, [preset(layout) for layout in layouts]))
        shown = [row.figures(number) for number, row in enumerate(rows)]
        result[name] = {
            "turnovers": shown,
            "last_to_second": shown[-1]["gbps"] / shown[2]["gbps"],
            "last_to_second_of_raw": shown[-1]["ratio"] / shown[2]["ratio"],
            "measured": [asdict(row) for row in rows],
        }
        console.print(_table(result[name], f"{', '.join(layouts)}: {options.payloads}, 90% full"))
    write_json(options.json, result)
    if options.plot is not None:
        draw_lines(
            {f"{name} layout(s)": [row["ratio"] for row in result[name]["turnovers"]] for name in cases},
            range(options.turnovers + 1),
            ("turnover", "share of raw O_DIRECT writes"),
            options.plot,
            "Writing to a disk that is 90% full",
            f"{options.payloads}, {options.disk >> 20} MiB, {result['about']['cpu']}",
        )


def _turnovers(
    place: Path, options: argparse.Namespace, layouts: Sequence[LatentLayout]
) -> Iterator[Turnover]:
    disk = DiskTier(StoreSettings(place / "store", disk_bytes=options.disk, payloads=options.payloads))
    try:
        with RawDisk(place / "raw", layouts[0].block_bytes, RAW_BLOCKS) as raw:
            churn = Churn(disk, layouts)
            for _ in range(options.turnovers + 1):
                yield churn.turnover(raw)
    finally:
        disk.close()


def _table(result: dict[str, Any], title: str) -> Table:
    made = Table(
        title=title, caption=f"last turnover to the second: {result['last_to_second_of_raw']:.2f} of raw"
    )
    for head in ("turnover", "GB/s", "raw GB/s", "ratio", "freeing", "CPU ms/MiB p50", "max"):
        made.add_column(head, justify="right")
    for row in result["turnovers"]:
        made.add_row(
            str(row["turnover"]) if row["turnover"] else "filling",
            f"{row['gbps']:.2f}",
            f"{row['raw_gbps']:.2f}",
            f"{row['ratio']:.2f}",
            f"{100 * row['drop_share']:.0f}%",
            f"{row['cpu_ms_per_mib_p50']:.2f}",
            f"{row['cpu_ms_per_mib_max']:.2f}",
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
