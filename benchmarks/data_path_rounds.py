"""The rounds of ``data_path``: each takes every measurement once, its limit beside it."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import harmonic_mean, median
from types import TracebackType
from typing import Any, Self

from benchmarks import page_cache
from benchmarks.daemon import Daemon
from benchmarks.limits import DEPTHS, Memcpy, RawDisk
from benchmarks.memory import host_available_bytes, private_bytes
from benchmarks.options import BenchmarkError
from benchmarks.worker import Worker
from kvstore.layout import DType, LatentLayout
from kvstore.settings import PayloadKind

MATCH_BLOCKS = 2048  # a document of 128K tokens
MATCHES = 50  # a round
WARM_LOADS = 5  # a round
WRITE_ARENAS = 8
RAW_BLOCKS = 512  # of one raw measurement, at most
_LONG, _SHORT, _FILL = 0, 1, 2  # seeds of the documents that are there from the first round on
# Match touches no payload, so a document of small blocks does where the measured one is too short.
SMALL = LatentLayout(num_layers=1, latent_rank=16, rope_dim=0, dtype=DType.FP8)


@dataclass(frozen=True)
class Plan:
    """What is measured. Block numbers follow from the arena: see each."""

    layout: LatentLayout
    blocks: int
    payloads: PayloadKind
    arena_bytes: int
    device: str = "cpu"

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.layout.block_bytes

    @property
    def warm_blocks(self) -> int:
        """A document that lies in the arena, with some room: what is loaded once stays there."""
        return max(1, int(self.arena_bytes * 0.8) // self.block_bytes)

    @property
    def store_blocks(self) -> int:
        """As many as find room in a free arena, whatever the disk does."""
        return max(1, int(self.arena_bytes * 0.7) // self.block_bytes)

    @property
    def write_blocks(self) -> int:
        """More than the arena can keep from the disk."""
        return -(-WRITE_ARENAS * self.arena_bytes // self.block_bytes) + 1

    @property
    def raw_blocks(self) -> int:
        """Blocks of one raw measurement."""
        return min(self.blocks, RAW_BLOCKS)

    @property
    def disk_bytes(self) -> int:
        """For the daemon: full from the first round on, so old blocks must go for the new ones."""
        blocks = self.blocks + self.warm_blocks + self.store_blocks + self.write_blocks
        return int(blocks * self.block_bytes * 1.1) + (256 << 20)

    @property
    def disk_need(self) -> int:
        """Room that the run takes on disk."""
        return self.disk_bytes + self.raw_blocks * self.block_bytes + (1 << 30)

    def flags(self) -> list[str]:
        """The daemon's."""
        return [
            *("--host-bytes", str(self.arena_bytes)),
            *("--disk-bytes", str(self.disk_bytes)),
            *("--payloads", self.payloads),
        ]

    def about(self) -> dict[str, Any]:
        """The plan as figures."""
        return {
            "layout": self.layout.to_dict(),
            "block_bytes": self.block_bytes,
            "blocks": self.blocks,
            "warm_blocks": self.warm_blocks,
            "store_blocks": self.store_blocks,
            "write_blocks": self.write_blocks,
            "raw_blocks": self.raw_blocks,
            "match_blocks": MATCH_BLOCKS,
            "payloads": self.payloads,
            "arena_bytes": self.arena_bytes,
            "device": self.device,
            "cold_means": "daemon killed and started again, its files dropped from the page cache"
            " (fadvise DONTNEED, checked with mincore)",
        }


@dataclass(frozen=True)
class Round:
    """One round; rates in bytes a second. Of raw I/O one for each depth of the queue."""

    raw_read: dict[int, float]  # before ours and after: a shared disk moves in between
    bare_read: float  # read, checked and copied by bare calls
    cold: float
    warm_memcpy: list[float]
    warm: list[float]
    store_memcpy: list[float]
    store: float
    raw_write: dict[int, float]
    bare_write: float  # copied, checked and written by bare calls
    write: float
    match_seconds: list[float]
    daemon_rss: int  # the most that was seen, without the arena
    cached_share: float  # of the daemon's files, after they were dropped

    def line(self, number: int) -> str:
        """A line to be printed as it comes."""

        def way(name: str, value: float, limit: float) -> str:
            return f"{name} {value / 1e9:.2f} of {limit / 1e9:.2f} ({value / limit:.2f})"

        parts = (
            way("cold", self.cold, max(self.raw_read.values())),
            way("warm", median(self.warm), median(self.warm_memcpy)),
            way("store", self.store, median(self.store_memcpy)),
            way("write", self.write, max(self.raw_write.values())),
        )
        return f"round {number}: {', '.join(parts)} GB/s; match {1000 * median(self.match_seconds):.2f} ms"


class Course:
    """A daemon with the document on its disk, and the worker. Use it as a context."""

    def __init__(self, plan: Plan, place: Path) -> None:
        self._plan = plan
        self._place = place
        self._open = ExitStack()
        self._order = random.Random(0)
        self._rss = 0

    def __enter__(self) -> Self:
        plan = self._plan
        need = (plan.blocks + plan.raw_blocks + 2 * plan.warm_blocks) * plan.block_bytes + plan.arena_bytes
        if (free := host_available_bytes()) < need:
            raise BenchmarkError(
                f"{need >> 20} MiB of memory are needed, {free >> 20} free; measure fewer --blocks"
            )
        try:
            self._prepare()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _prepare(self) -> None:
        plan, enter = self._plan, self._open.enter_context
        self._disk = enter(RawDisk(self._place / "raw", plan.block_bytes, plan.raw_blocks))
        self._memcpy = Memcpy(plan.block_bytes, plan.warm_blocks)
        self._daemon = enter(Daemon(self._place / "store", plan.flags()))
        self._worker = enter(Worker(self._daemon.url, plan.layout, plan.blocks, device=plan.device))
        self._worker.meet()
        self._prints = self._worker.fingerprints()
        self._document = self._worker.document(_LONG, plan.blocks)
        self._worker.store_durably(self._document)
        self._places = self._disk.places(self._payload_files())
        self._short = self._worker.document(_SHORT, plan.warm_blocks)
        self._worker.store_durably(self._short)
        # A cache's disk is full: new blocks are written where old ones were.
        self._worker.store_durably(self._worker.document(_FILL, plan.store_blocks + plan.write_blocks))
        if plan.blocks >= MATCH_BLOCKS:
            return
        small = enter(Worker(self._daemon.url, SMALL, MATCH_BLOCKS))
        small.meet()
        small.store_durably(small.document(_LONG, MATCH_BLOCKS))
        self._matcher = small

    def _payload_files(self) -> list[Path]:
        """The files with the document's bytes, the first written first."""
        directory = self._daemon.data / "payloads" / str(self._plan.block_bytes)
        files = (path for path in directory.rglob("*") if path.is_file())
        return sorted(files, key=lambda path: (len(path.name), path.name))

    @cached_property
    def _matcher(self) -> Worker:
        return self._worker

    def round(self, number: int) -> Round:
        """Take every measurement once. ``number`` makes what is stored new."""
        plan, worker = self._plan, self._worker
        self._rss = 0
        cached = self._restart(kill=True)
        depths = self._order.sample(DEPTHS, len(DEPTHS))
        raw_read = {depth: self._disk.read(depth, self._places) for depth in depths}
        bare_read = self._disk.read_bare(self._places)
        cold = self._rate(plan.blocks, self._load_all())
        raw_read = {depth: _mean(raw_read[depth], self._disk.read(depth, self._places)) for depth in depths}
        self._check_pool()
        matches = self._matches()
        warm_memcpy, warm = self._warm()
        self._restart(kill=False)  # or the uses of the documents that stay are forgotten
        store_memcpy = [self._memcpy.copy()]
        fresh = worker.document(2 * number + 3, plan.store_blocks)
        seconds, ticket = worker.store(fresh)
        store_memcpy.append(self._memcpy.copy())
        worker.client.durable(ticket, timeout=60)
        raw_write = {depth: self._disk.write(depth) for depth in depths}
        write = self._rate(
            plan.write_blocks, worker.store_durably(worker.document(2 * number + 4, plan.write_blocks))
        )
        bare_write = self._disk.write_bare()
        raw_write = {depth: _mean(raw_write[depth], self._disk.write(depth)) for depth in depths}
        self._note_memory()
        return Round(
            raw_read=raw_read,
            bare_read=bare_read,
            cold=cold,
            warm_memcpy=warm_memcpy,
            warm=warm,
            store_memcpy=store_memcpy,
            store=self._rate(plan.store_blocks, seconds),
            raw_write=raw_write,
            bare_write=bare_write,
            write=write,
            match_seconds=matches,
            daemon_rss=self._rss,
            cached_share=cached,
        )

    def _rate(self, blocks: int, seconds: float) -> float:
        return blocks * self._plan.block_bytes / seconds

    def _restart(self, *, kill: bool) -> float:
        """End the daemon, drop its files from the page cache, start it; the share that was left in it."""
        self._note_memory()
        self._daemon.stop(kill=kill)
        dropped = page_cache.drop(self._daemon.data)
        self._daemon.start()
        for worker in {self._worker, self._matcher}:
            worker.meet()
        return dropped.cached_after / max(dropped.stored_bytes, 1)

    def _note_memory(self) -> None:
        self._rss = max(self._rss, private_bytes(self._daemon.pid))

    def _load_all(self) -> float:
        self._worker.wipe()
        seconds = self._worker.load(self._document)
        self._note_memory()
        return seconds

    def _check_pool(self) -> None:
        if self._worker.fingerprints() != self._prints:
            raise BenchmarkError("the loaded bytes are not those that were stored; that is a bug")

    def _matches(self) -> list[float]:
        document = self._matcher.document(_LONG, MATCH_BLOCKS)
        self._matcher.touch(document)
        return [self._matcher.match_seconds(document) for _ in range(MATCHES)]

    def _warm(self) -> tuple[list[float], list[float]]:
        self._worker.load(self._short)  # brings it into the arena
        memcpy, warm = [], []
        for _ in range(WARM_LOADS):
            memcpy.append(self._memcpy.copy())
            warm.append(self._rate(len(self._short), self._worker.load(self._short)))
        return memcpy, warm


def _mean(before: float, after: float) -> float:
    """The rate over two measurements of as many bytes."""
    return harmonic_mean((before, after))
