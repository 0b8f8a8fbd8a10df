"""What watching costs: CPU of the observing calls beside that of the Match and the warm load they watch.

The two alternate within one run. A call of the daemon is metered by the kernel's word on
the daemon's CPU, what observes it by the same calls on a tally here.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import kvstore
from benchmarks.arguments import machine, write_json
from benchmarks.daemon import Daemon
from kvstore.api import Match, MissReason
from kvstore.hashing import block_hashes
from kvstore.layout import LatentLayout
from kvstore.loading import Outcome
from kvstore.namespace import Namespace
from kvstore.testing.chains import store_chain
from server.record import RequestRecord
from server.tally import Asked, Loaded, Tally, Worth

LAYOUT = LatentLayout(num_layers=1, latent_rank=64, rope_dim=0)
_CALLS = 200  # in one round
_MATCH = Match(blocks=16, host_blocks=10, disk_blocks=6, reason=MissReason.DIVERGED)


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of CPU: a call in the daemon, and what observes it."""

    what: str
    call: float
    observing: float


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, by the scheduler's own count."""
    return (
        sum(
            int(task.joinpath("schedstat").read_text().split()[0])
            for task in Path(f"/proc/{pid}/task").iterdir()
        )
        / 1e9
    )


def each(calls: int, clock: Callable[[], float], call: Callable[[], object]) -> float:
    """Microseconds by this clock of one of so many calls."""
    began = clock()
    for _ in range(calls):
        call()
    return (clock() - began) / calls * 1e6


def measure(blocks: int, rounds: int) -> list[Cost]:
    """Costs of Match and of a warm load of a document of so many blocks, medians over rounds."""
    tally, record, asked = Tally(Worth(prefill_rate=5000.0)), RequestRecord(16 << 20), bytes(32 * blocks)

    def observe_match() -> None:
        tally.matched("default", Asked(1100, 0, 64), _MATCH)
        record.note(1100, asked)
        tally.answered("Match", "OK")
        tally.took("match", 0.0005)

    def observe_load() -> None:
        tally.loaded("default", Loaded(Outcome(16, 0, 16, 0, 0), 64, 1 << 20, 0.01))
        tally.answered("Load", "OK")

    figures: dict[str, list[tuple[float, float]]] = {"match": [], "warm load": []}
    with tempfile.TemporaryDirectory(prefix="latentkv-") as directory:
        data = Path(directory) / "data"
        with Daemon(data, ("--host-bytes", "256MiB", "--disk-bytes", "512MiB")) as daemon:
            store = kvstore.connect(daemon.url)
            namespace = store.open_namespace(Namespace(LAYOUT, model="observed"))
            hashes = block_hashes(namespace, list(range(64 * blocks)))
            store_chain(store, namespace, hashes, nbytes=LAYOUT.block_bytes)

            def load() -> None:
                with store.load(namespace, hashes) as stream:
                    for _ in stream:
                        pass

            calls = {"match": lambda: store.match(namespace, hashes, 64 * blocks + 1), "warm load": load}
            for _ in range(rounds):
                for what, observe in (("match", observe_match), ("warm load", observe_load)):
                    call = each(_CALLS, lambda: cpu_seconds(daemon.pid), calls[what])
                    figures[what].append((call, each(_CALLS * 10, time.thread_time, observe)))
            store.close()
    return [
        Cost(
            f"{what} of {blocks} blocks",
            statistics.median(call for call, _ in costs),
            statistics.median(observing for _, observing in costs),
        )
        for what, costs in figures.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(prog="observation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of 200 calls [7]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args(arguments)
    costs = [cost for blocks in (16, 128, 1024) for cost in measure(blocks, given.rounds)]
    print("call                          daemon CPU  observing   share")
    for cost in costs:
        share = cost.observing / cost.call
        print(f"{cost.what:<28} {cost.call:>8.0f} us {cost.observing:>7.1f} us {share:>7.2%}")
    write_json(given.json, {"machine": machine(), "costs": [asdict(cost) for cost in costs]})


if __name__ == "__main__":
    main()
