"""One document on every way to its first new token: cold, from DISK, from HOST, from DEVICE.

The worker (model, session, pool) lives on while the daemon dies and comes back, so what
is timed is what a user waits for: match, load, the prefill of what is missing, one token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass

import torch
from torch import Tensor

import kvstore
from benchmarks.daemon import Daemon
from benchmarks.documents import Tokens
from benchmarks.metering import MeteredStore, TokenCounter, Transferred
from benchmarks.models import Subject
from benchmarks.options import BenchmarkError, Options
from benchmarks.page_cache import Dropped, drop
from kvstore.api import Tier
from mla import Session, detach

DURABLE_SECONDS = 600.0
LOAD_SECONDS = 120.0  # for a batch; a miss must not pass for a slow hit


@dataclass(frozen=True, slots=True)
class Run:
    """One timed ``Session.generate``; ``logits [vocabulary]`` are those of its only token."""

    seconds: float
    hit: int
    miss: int
    forwarded: int  # by the hook on the embedding
    by_tier: dict[Tier, int]
    loaded: Transferred
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Restart:
    """What became of the daemon between storing and loading."""

    pid_before: int
    pid_after: int
    ended_by: int | None  # minus the signal, or the exit code
    asked_for: int
    dropped: Dropped

    @property
    def happened(self) -> bool:
        """Whether another process serves now, and the one before ended as it was told to."""
        return self.pid_after != self.pid_before and self.ended_by == self.asked_for


@dataclass(frozen=True, slots=True)
class Ways:
    """All runs of one document. ``control``: the logits after one loaded block was negated."""

    tokens: int
    cold: Run
    disk: tuple[Run, ...]
    host: tuple[Run, ...]
    device: tuple[Run, ...]
    control: Run
    mended: Run  # the block as it was again
    restarts: tuple[Restart, ...]
    disk_reads: int  # blocks that the daemon read after its last start, by its own count


class Journey:
    """Takes documents along all ways, one after the other, with one model and one daemon."""

    def __init__(
        self,
        subject: Subject,
        daemon: Daemon,
        options: Options,
        counter: TokenCounter,
        announce: Callable[[str, int], None],
    ) -> None:
        self._subject, self._daemon, self._options = subject, daemon, options
        self._counter, self._announce = counter, announce

    def take(self, tokens: Tokens) -> Ways:
        """Store a document and bring it back. Raises ``BenchmarkError`` if that fails."""
        with self._connect() as store:
            session = self._session(store, len(tokens))
            try:
                return self._ways(session, store, tokens)
            finally:
                session.close()
                detach(self._subject.model)

    def _connect(self) -> AbstractContextManager[MeteredStore]:
        return closing(MeteredStore(kvstore.connect(self._daemon.url, timeout=30.0)))

    def _session(self, store: MeteredStore, tokens: int) -> Session:
        # The longer documents begin like the shorter ones: a salt keeps them from hitting those.
        session = Session(
            self._subject.model,
            store,
            exact=self._options.exact,
            prefill_chunk=self._options.chunk,
            pool_tokens=tokens + 2 * self._options.chunk,
            salt=f"{tokens} tokens",
            load_timeout=LOAD_SECONDS,
            store_deadline=DURABLE_SECONDS,
        )
        session.pool.data.fill_(0)  # so that no run pays for touching its memory first
        return session

    def _ways(self, session: Session, store: MeteredStore, tokens: Tokens) -> Ways:
        self._announce("prefill and store", len(tokens))
        cold = self._run(session, store, tokens)
        self._require_cold(cold, len(tokens))
        self._announce("wait until it is on disk", 0)
        if not session.flush(DURABLE_SECONDS):
            raise BenchmarkError(f"{len(tokens)} tokens did not reach the disk; see {self._daemon.data}.log")
        restarts, disk = [], []
        for _ in range(self._options.repeats):
            restarts.append(self._restart(store))
            disk.append(self._again(session, store, tokens, Tier.DISK))
        reads = store.status().counters.get("disk_read_blocks", 0)
        host = [self._again(session, store, tokens, Tier.HOST) for _ in range(self._options.repeats)]
        device = [self._again(session, store, tokens, Tier.DEVICE) for _ in range(self._options.repeats)]
        control, mended = self._control(session, store, tokens)
        return Ways(
            tokens=len(tokens),
            cold=cold,
            disk=tuple(disk),
            host=tuple(host),
            device=tuple(device),
            control=control,
            mended=mended,
            restarts=tuple(restarts),
            disk_reads=reads,
        )

    def _require_cold(self, run: Run, tokens: int) -> None:
        if run.hit or run.forwarded != tokens:
            raise BenchmarkError(
                f"the run without a cache hit {run.hit} tokens and forwarded {run.forwarded} of {tokens};"
                " give --data a directory of its own"
            )

    def _restart(self, store: MeteredStore) -> Restart:
        self._announce("restart the daemon", 0)
        before = self._daemon.pid
        self._daemon.stop(kill=self._options.sigkill)
        dropped = drop(self._daemon.data)
        self._daemon.start()
        store.status()  # the client reconnects here, outside of what is timed
        return Restart(
            pid_before=before,
            pid_after=self._daemon.pid,
            ended_by=self._daemon.ended_by,
            asked_for=-9 if self._options.sigkill else 0,
            dropped=dropped,
        )

    def _again(self, session: Session, store: MeteredStore, tokens: Tokens, tier: Tier) -> Run:
        self._announce(f"load from {tier.upper()}", 0)
        if tier is not Tier.DEVICE:
            session.pool.clear()
        run = self._run(session, store, tokens)
        if run.by_tier.get(tier, 0) != run.hit or not run.hit:
            raise BenchmarkError(
                f"{len(tokens)} tokens should have come from {tier.upper()}, but came from"
                f" {dict(run.by_tier) or 'nowhere'}; see {self._daemon.data}.log"
            )
        return run

    def _control(self, session: Session, store: MeteredStore, tokens: Tokens) -> tuple[Run, Run]:
        """Runs with the middle block of the prefix negated in the pool, and as it was again."""
        pool = session.pool
        middle = len(store.hashes) // 2
        if (block := pool.acquire(store.hashes[middle])) is None:
            raise BenchmarkError(f"block {middle} of the prefix has left the pool; make the run smaller")
        try:
            with torch.no_grad():
                pool.data[:, block].neg_()
                control = self._again(session, store, tokens, Tier.DEVICE)
                pool.data[:, block].neg_()
        finally:
            pool.release([block])
        return control, self._again(session, store, tokens, Tier.DEVICE)

    def _run(self, session: Session, store: MeteredStore, tokens: Tokens) -> Run:
        self._counter.take(), store.take()
        start = time.perf_counter()
        answer = session.generate(tokens, max_new_tokens=1, do_sample=False, output_logits=True)
        seconds = time.perf_counter() - start
        assert answer.logits is not None
        session.flush(DURABLE_SECONDS)  # its queue must not run into the next one's time
        return Run(
            seconds=seconds,
            hit=answer.usage.prompt_cache_hit_tokens,
            miss=answer.usage.prompt_cache_miss_tokens,
            forwarded=self._counter.take(),
            by_tier=dict(answer.usage.hit_tokens_by_tier),
            loaded=store.take(),
            logits=answer.logits[0][0].float().cpu(),
        )
