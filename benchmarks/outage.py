"""What does a daemon that is stopped, or restarted, cost the worker in front of it?

    python -m benchmarks.outage --deadline 2 --json out/outage.json

A worker makes one request after the other: Match, then Load of what matched, each byte compared.
Meanwhile the daemon is healthy, then under SIGSTOP, then continued, stopped again, killed and
started anew. What counts is the time that the store takes of each request, and how soon after its
return the daemon is hit again by the same client.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

import kvstore
from benchmarks import arguments
from benchmarks.arguments import Parser, machine, workplace, write_json
from benchmarks.daemon import Daemon
from benchmarks.options import BenchmarkError
from kvstore.api import MissReason
from kvstore.client import Client
from kvstore.hashing import block_hashes
from kvstore.layout import preset
from kvstore.namespace import Namespace
from kvstore.testing.chains import content, store_chain, tokens

LAYOUT = preset("tiny")
BLOCKS = 64
GIVE_UP = 60.0  # seconds after which the daemon counts as lost


@dataclass(frozen=True, slots=True)
class Request:
    """One request's time in the store, seconds, and how many blocks it hit."""

    seconds: float
    blocks: int


class Worker:
    """A client that requests one document; every byte it gets is compared."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._namespace = client.open_namespace(Namespace(LAYOUT, model="outage"))
        self._hashes = block_hashes(self._namespace, tokens(0, BLOCKS))
        self._right = [content(block, LAYOUT.block_bytes) for block in self._hashes]
        store_chain(client, self._namespace, self._hashes, nbytes=LAYOUT.block_bytes)

    def request(self) -> Request:
        """Match and Load. Raises ``BenchmarkError`` if a byte is wrong."""
        spent, loaded, started = 0.0, 0, time.perf_counter()
        match = self._client.match(self._namespace, self._hashes, BLOCKS * LAYOUT.block_tokens + 1)
        if match.reason is MissReason.UNAVAILABLE:
            return Request(time.perf_counter() - started, 0)
        with self._client.load(self._namespace, self._hashes[: match.blocks]) as load:
            for batch in load:
                spent += time.perf_counter() - started
                for block in batch:
                    if block.data != self._right[block.index]:
                        raise BenchmarkError(f"block {block.index} has wrong bytes")
                    loaded += 1
                started = time.perf_counter()
        return Request(spent + time.perf_counter() - started, loaded)

    def requests(self, count: int) -> list[Request]:
        """Several of them."""
        return [self.request() for _ in range(count)]

    def until_hit(self) -> float:
        """Seconds until a request hits everything again. Raises ``BenchmarkError`` if that never comes."""
        started = time.perf_counter()
        while self.request().blocks < BLOCKS:
            if time.perf_counter() - started > GIVE_UP:
                raise BenchmarkError(f"no hit within {GIVE_UP:g} s of the daemon's return")
            time.sleep(0.01)  # the model's time between two requests
        return time.perf_counter() - started


def main(options: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 2 on bad input or wrong bytes."""
    return arguments.run("outage", lambda: _benchmark(_parse(options), Console()))


def _parse(options: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("outage", "What a daemon that is away costs its workers.", arena="256MiB")
    add = parser.add_argument
    add("--deadline", type=float, default=2.0, metavar="S", help="the client's deadline a call [2]")
    add("--requests", type=arguments.at_least(2), default=200, metavar="N", help="in each phase [200]")
    return parser.parse_args(options)


def _benchmark(options: argparse.Namespace, console: Console) -> None:
    with workplace(options.data, 1 << 30) as place:
        figures = _measure(place, options)
    figures |= {"about": machine() | {"deadline_seconds": options.deadline, "requests": options.requests}}
    console.print(_table(figures))
    write_json(options.json, figures)


def _measure(place: Path, options: argparse.Namespace) -> dict[str, object]:
    flags = ["--host-bytes", str(options.arena), "--disk-bytes", "512MiB", "--payloads", options.payloads]
    with Daemon(place / "store", flags) as daemon:
        client = kvstore.connect(daemon.url, timeout=options.deadline)
        try:
            worker = Worker(client)
            worker.requests(5)
            healthy = worker.requests(options.requests)
            os.kill(daemon.pid, signal.SIGSTOP)
            first, stopped = worker.request(), worker.requests(options.requests)
            os.kill(daemon.pid, signal.SIGCONT)
            continued = worker.until_hit()
            os.kill(daemon.pid, signal.SIGSTOP)
            worker.requests(2)
            daemon.stop(kill=True)
            daemon.start()
            restarted = worker.until_hit()
            counters = client.status().counters
        finally:
            client.close()
    return {
        "healthy_p50_seconds": median(request.seconds for request in healthy),
        "first_stopped_seconds": first.seconds,
        "stopped_p50_seconds": median(request.seconds for request in stopped),
        "stopped_max_seconds": max(request.seconds for request in stopped),
        "hit_after_continue_seconds": continued,
        "hit_after_restart_seconds": restarted,
        "circuit_opened": counters["client_circuit_opened"],
        "circuit_refused": counters["client_circuit_refused"],
    }


def _table(figures: dict[str, object]) -> Table:
    made = Table(title=f"A daemon that is away, {BLOCKS} blocks a request")
    made.add_column("")
    made.add_column("time", justify="right")
    for name, title in (
        ("healthy_p50_seconds", "request, daemon healthy, p50"),
        ("first_stopped_seconds", "first request under SIGSTOP"),
        ("stopped_p50_seconds", "each further one, p50"),
        ("stopped_max_seconds", "each further one, most"),
        ("hit_after_continue_seconds", "from SIGCONT to the first hit"),
        ("hit_after_restart_seconds", "from the new daemon's ready line to the first hit"),
    ):
        made.add_row(title, f"{1000 * float(str(figures[name])):.2f} ms")
    return made


if __name__ == "__main__":
    sys.exit(main())
