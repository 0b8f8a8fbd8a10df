"""Does the store stay right whatever happens to it?

    python -m benchmarks.soak --minutes 20 --seed 1 --json out/soak.json

Workers in processes of their own make requests with skewed, overlapping prompts over several
tenants and layouts, through small tiers of a real daemon, while faults are injected: in rounds, all
kinds in each, in an order that follows from the seed, as do the prompts. Every loaded byte is compared
with what its hash determines. After each restart documents that were confirmed to be on disk are
looked for; after each round all workers rest, and nothing may be held. Each kind of payloads has half
of the time. In the last part of that the daemon is left alive, and its anonymous memory must not grow.
The exit status is 1 if anything was wrong, lost, stuck or leaked, or grew.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import arguments
from benchmarks.arguments import Parser, machine, workplace, write_json
from benchmarks.options import BenchmarkError
from benchmarks.soaking.curve import Curve, Watch
from benchmarks.soaking.faults import EARLY, FAULTS, Fault, in_order
from benchmarks.soaking.greedy import SIZES
from benchmarks.soaking.scene import Scene, block_sizes
from kvstore.checking import check
from kvstore.records import FaultKind
from kvstore.settings import MIB

KINDS = ("lmdb", "slab")
MUST_BE_ZERO = (
    *("wrong_bytes", "lost_durable", "stuck_calls", "leaked_slots", "leaked_leases", "leaked_files"),
    *("leaked_rows", "violated", "deaths", "growing_memory"),
)
EARLY_UNTIL = 0.3  # of the time; from then on the daemon lives, but for what is left of the first round
JUDGED_FROM = 0.5  # of the time; until then it may settle
PAUSE_SECONDS = 0.25  # between two faults, at most


def main(options: Sequence[str] | None = None) -> int:
    """Run the soak; the exit status is 1 if the store failed, 2 on bad input."""
    failed = False

    def soak() -> None:
        nonlocal failed
        failed = not _soak(_parse(options), Console())

    return arguments.run("soak", soak) or int(failed)


def _parse(options: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("soak", "Faults of every kind under a load that verifies every byte.", arena="8MiB")
    parser.set_defaults(payloads=None)  # each in turn
    parser.add_argument("--minutes", type=float, default=2.0, metavar="M", help="how long [2]")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of prompts and faults [0]")
    parser.add_argument("--only", type=_faults, default=FAULTS, metavar="F,F", help="these faults [all]")
    return parser.parse_args(options)


def _faults(names: str) -> list[Fault]:
    """Those of these names."""
    known = {fault.__name__: fault for fault in FAULTS}
    asked = names.split(",")
    if unknown := sorted(set(asked) - known.keys()):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such fault; there are {', '.join(known)}")
    return [known[name] for name in asked]


def _soak(options: argparse.Namespace, console: Console) -> bool:
    kinds = (options.payloads,) if options.payloads else KINDS
    began = time.monotonic()
    with workplace(options.data, 256 * MIB) as place:
        runs = [_Run(place / kind, kind, options, 60 * options.minutes / len(kinds)) for kind in kinds]
        for run in runs:
            run.go(console)
    figures = _figures(runs) | {
        "seconds": round(time.monotonic() - began, 1),
        "seed": options.seed,
        "about": machine(),
    }
    console.print(_table(figures))
    for run in runs:
        console.print(f"{run.kind}: the daemon's memory went from {run.memory}", soft_wrap=True)
    write_json(options.json, figures)
    for run in runs:
        for evidence in run.evidence:
            console.print(f"[red]{run.kind}:[/red] {evidence}", soft_wrap=True)
    return not any(run.evidence for run in runs)


class _Run:
    """A soak of one kind of payloads."""

    def __init__(self, place: Path, kind: str, options: argparse.Namespace, seconds: float) -> None:
        self.kind = kind
        self.faults: Counter[str] = Counter()
        self.evidence: list[object] = []  # of failure
        self.leaked_files: list[str] = []
        self.disk_bytes = 0
        self.memory = Curve.of([], 0.0)
        self._kinds = options.only
        self._place = place
        self._seconds = seconds
        self._flags = [
            *("--payloads", kind, "--host-bytes", str(options.arena), "--http", "127.0.0.1:0"),
            *("--interval", "512", "--lease-seconds", "2", "--drain-seconds", "20", "--readers", "4"),
            # What has a bound is soon full, so that what still grows has none.
            *("--ghost-bytes", "512KiB", "--record-bytes", "256KiB"),
        ]
        self._rng = random.Random(f"{options.seed} {kind}")

    def go(self, console: Console) -> None:
        """Round after round, until the time is over; at least one."""
        self._place.mkdir()
        with Scene(self._place, self._flags, self._rng) as scene:
            self.seen = scene.seen
            until = time.monotonic() + self._seconds
            try:
                with Watch(lambda: scene.daemon.pid) as watch:
                    self._rounds(scene, until, console)
                self.memory = Curve.of(watch.samples, until - (1 - JUDGED_FROM) * self._seconds)
                self._end(scene)
            except BenchmarkError as error:
                self.evidence.append(f"{error}; the daemon's log ends with {scene.daemon.last_words()!r}")
        self.evidence += [*self.seen.wrong, *self.seen.lost, *self.seen.stuck, *self.seen.violated]
        self.evidence += [*self.seen.deaths, *self.leaked_files, *(+self.seen.leaked).items()]
        if self.memory.grows:
            self.evidence.append(f"the daemon's memory grows: {self.memory}")

    def _rounds(self, scene: Scene, until: float, console: Console) -> None:
        while True:
            self._round(scene, until)
            with scene.quiet():
                self._look(scene)
            left, hits = until - time.monotonic(), self.seen.hits
            console.print(f"{self.kind}: {self.faults.total()} faults, {hits} hits, {left:.0f} s left")
            if time.monotonic() >= until:
                return

    def _round(self, scene: Scene, until: float) -> None:
        """All kinds; the first round is not cut short."""
        began, first = until - self._seconds, not self.faults
        for fault in in_order(self._rng, self._kinds):
            now = time.monotonic()
            if not first and now >= until:
                return
            if not first and fault in EARLY and now >= began + EARLY_UNTIL * self._seconds:
                continue
            fault(scene)
            self.faults[fault.__name__] += 1
            scene.seen.course.append((round(time.monotonic() - began, 2), fault.__name__))
            scene.supervise()
            time.sleep(self._rng.uniform(0.0, PAUSE_SECONDS))

    def _look(self, scene: Scene) -> None:
        scene.require_owed()
        scene.require_writing()
        used = sum(file.stat().st_blocks * 512 for file in self._place.rglob("*") if file.is_file())
        self.disk_bytes = max(self.disk_bytes, used)

    def _end(self, scene: Scene) -> None:
        """All workers go, and the daemon: nothing may be left but the data."""
        for worker in scene.workers:
            if not worker.end():
                scene.seen.stuck.append({"verb": "close", "why": f"worker {worker.pid} does not end"})
        scene.require_nothing_held()
        self.leaked_files += scene.left_open()
        # A start frees what failed writes left; what is there after the next end is left for ever.
        for _ in range(2):
            scene.daemon.stop(kill=False)
            if scene.daemon.ended_by != 0:
                scene.seen.deaths.append(f"SIGTERM ended the daemon with {scene.daemon.ended_by}")
            sockets = Path(scene.daemon.url.removeprefix("unix://")).parent
            self.leaked_files += [str(file) for file in sockets.iterdir() if file.is_socket()]
            self._check(scene.daemon.data)
            scene.daemon.start()

    def _check(self, data: Path) -> None:
        report = check(data)
        # A payload may be wrong: injected damage stays until somebody reads it.
        wrong = [fault for fault in report.faults if fault.kind is not FaultKind.PAYLOAD_WRONG]
        self.seen.violated += [str(fault) for fault in wrong]
        if report.unnamed:
            self.leaked_files.append(f"{report.unnamed} payloads that no record names")
        known = {"LOCK", "catalog", "payloads", *(f"payloads/{size}" for size in block_sizes() | SIZES)}
        found = [file.relative_to(data) for file in data.rglob("*")]
        self.leaked_files += [str(f) for f in found if str(f) not in known and str(f.parent) not in known]


def _figures(runs: Sequence[_Run]) -> dict[str, Any]:
    seen = [run.seen for run in runs]
    faults: Counter[str] = sum((run.faults for run in runs), Counter())
    return {
        "faults": faults.total(),
        "faults_by_kind": dict(sorted(faults.items())),
        "kinds": len(faults),
        "operations": sum(each.operations for each in seen),
        "hits": sum(each.hits for each in seen),
        "hit_blocks": sum(each.hit_blocks for each in seen),
        "confirmed": sum(each.confirmed for each in seen),
        "looked_for": sum(each.checked for each in seen),
        "refused": dict(sum((each.refused for each in seen), Counter())),
        "callers": dict(sum((each.callers for each in seen), Counter())),
        "wrong_bytes": sum(len(each.wrong) for each in seen),
        "lost_durable": sum(len(each.lost) for each in seen),
        "stuck_calls": sum(len(each.stuck) for each in seen),
        "leaked_slots": sum(each.leaked["slots"] for each in seen),
        "leaked_leases": sum(each.leaked["leases"] for each in seen),
        "leaked_rows": sum(each.leaked["rows"] for each in seen),
        "leaked_files": sum(len(run.leaked_files) for run in runs),
        "violated": sum(len(each.violated) for each in seen),
        "deaths": sum(len(each.deaths) for each in seen),
        "growing_memory": sum(run.memory.grows for run in runs),
        "memory": {run.kind: asdict(run.memory) for run in runs},
        "latest_call_seconds": round(max(each.overrun for each in seen), 2),
        "disk_bytes": max(run.disk_bytes for run in runs),
    }


def _table(figures: dict[str, Any]) -> Table:
    made = Table(title=f"A soak of {figures['seconds']:g} s, seed {figures['seed']}")
    made.add_column("")
    made.add_column("", justify="right")
    for kind, count in figures["faults_by_kind"].items():
        made.add_row(kind, str(count))
    made.add_section()
    for name in ("faults", "kinds", "operations", "hits", "confirmed", "looked_for", "latest_call_seconds"):
        made.add_row(name, str(figures[name]))
    made.add_section()
    for name in MUST_BE_ZERO:
        made.add_row(name, str(figures[name]), style="red" if figures[name] else None)
    return made


if __name__ == "__main__":
    sys.exit(main())
