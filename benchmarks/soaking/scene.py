"""What a soak's faults act on: the daemon, its workers, the ledger, and what was seen so far."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import kvstore
from benchmarks.options import BenchmarkError
from benchmarks.soaking.callers import Callers
from benchmarks.soaking.ledger import Document, Ledger
from benchmarks.soaking.processes import Event, FaultyDaemon, WorkerProcess
from benchmarks.soaking.requests import CALL_SECONDS, SPACES, Clock, Requester
from kvstore.api import MissReason
from kvstore.errors import KVStoreError
from kvstore.hashing import block_hashes
from kvstore.settings import MIB
from kvstore.testing.chains import store_chain, tokens

WORKERS = 3
DISK_BYTES = 32 * MIB  # less than all documents take
CAPACITY_BYTES = 24 * MIB  # of it for payloads, at least
STUCK_SECONDS = 30.0  # beyond a call's deadline; a busy machine may be late, but not so late
BACK_SECONDS = 30.0  # in which a daemon that is back must answer
NEW_BLOCKS = 2  # of a document by which is seen whether anything is still written
SETTLE_SECONDS = 45.0  # in which all that was held must be given back, and all that is dirty written


@dataclass
class Seen:
    """What counts, and what must not be. Guarded by the scene's lock."""

    operations: int = 0
    hits: int = 0
    hit_blocks: int = 0
    confirmed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    callers: Counter[str] = field(default_factory=Counter)  # what came back to those who mean harm
    wrong: list[Event] = field(default_factory=list)
    stuck: list[Event] = field(default_factory=list)
    lost: list[Event] = field(default_factory=list)
    leaked: Counter[str] = field(default_factory=Counter)
    violated: list[str] = field(default_factory=list)
    course: list[tuple[float, str]] = field(default_factory=list)  # faults, and when they ended
    deaths: list[str] = field(default_factory=list)  # of processes that nobody killed
    checked: int = 0  # documents that were owed and looked for
    overrun: float = 0.0  # seconds, of the call that was latest


class Scene:
    """Daemon and workers of one data directory. Use it as a context: its end kills them."""

    def __init__(self, place: Path, flags: list[str], rng: random.Random) -> None:
        self.rng = rng
        self.seen = Seen()
        self.ledger = Ledger(CAPACITY_BYTES)
        self.callers = Callers(place)
        self.callers.write()
        flags = [*flags, "--disk-bytes", str(DISK_BYTES), "--credentials", str(self.callers.file)]
        self.daemon = FaultyDaemon(place / "store", flags)
        self._files_at_start = self.daemon.open_files()
        self._lock = threading.Lock()
        self._chains: dict[Document, list[bytes]] = {}
        self._seeds = itertools.count(rng.randrange(1 << 30))
        self._client = kvstore.connect(self.daemon.url, timeout=CALL_SECONDS)
        self.asker = Requester(self._client, 0, rng, self._tell, Clock(self._tell))
        self.workers: list[WorkerProcess] = []
        self._replaced: list[WorkerProcess] = []  # whose children may live
        self.killed: dict[str, float] = {}  # tasks of the daemon, and when

    def __enter__(self) -> Scene:
        try:
            self.workers += [self._hire(number) for number in range(WORKERS)]
            for worker in self.workers:
                if not worker.heard("ready", BACK_SECONDS):
                    raise BenchmarkError("a worker does not begin; see its error above")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers + self._replaced:
            worker.forget()
        self._client.close()
        self.daemon.__exit__(None, None, None)

    def _hire(self, number: int) -> WorkerProcess:
        token_file = str(self.callers.token_file) if number == WORKERS - 1 else ""  # who has it gets bytes
        return WorkerProcess(self.daemon.url, next(self._seeds), self._hear, token_file)

    def replace_worker(self, number: int) -> None:
        """SIGKILL, and another one in its place."""
        self.workers[number].kill()
        self._replaced.append(self.workers[number])
        self.workers[number] = self._hire(number)

    # --- what is told

    def chain(self, document: Document) -> list[bytes]:
        """The hashes of a document."""
        if document not in self._chains:
            self._chains[document] = self.asker.hashes(*document)
        return self._chains[document]

    def _tell(self, event: str, **more: object) -> None:
        self._take(event, more | {"at": time.monotonic()})

    def _hear(self, worker: WorkerProcess, event: Event) -> None:
        if event["event"] == "late":
            event["ended"] -= worker.stopped_seconds(event["began"], event["ended"])
        self._take(event["event"], event)

    def _take(self, kind: str, event: Event) -> None:
        with self._lock:
            seen = self.seen
            match kind:
                case "request":
                    seen.operations += 1
                    self._use((event["space"], event["document"]))
                case "hit":
                    seen.hits += event["blocks"] > 0
                    seen.hit_blocks += event["blocks"]
                    self._use((event["space"], event["document"]))
                case "refused":
                    seen.refused[event["kind"]] += 1
                case "wrong":
                    seen.wrong.append(event)
                case "late":
                    over = event["ended"] - event["began"] - event["allowed"]
                    seen.overrun = max(seen.overrun, over)
                    if over > STUCK_SECONDS:
                        seen.stuck.append(event)
                case "forked" if not event["returned"]:
                    seen.violated.append("a forked child did not live to come back from the store")
                case "stored":
                    size = SPACES[event["space"]].layout.block_bytes
                    self.ledger.stored(_blocks(event["filled"]), size)
                case "sure":
                    seen.confirmed += 1
                    self._confirm(event)

    def _use(self, document: Document) -> None:
        self.ledger.used(self.chain(document), SPACES[document[0]].layout.block_bytes)

    def _confirm(self, event: Event) -> None:
        document = (event["space"], event["document"])
        filled = _blocks(event["filled"])
        self.ledger.confirmed(document, self.chain(document), filled, event["began"], event["at"])

    # --- what must hold

    def wait(self) -> None:
        """Let a fault last."""
        time.sleep(self.rng.uniform(0.2, 1.5))

    def await_daemon(self) -> None:
        """Wait until the daemon answers this client."""
        until = time.monotonic() + BACK_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(KVStoreError):
                self._client.status()
                return
            time.sleep(0.02)
        self.seen.stuck.append({"verb": "status", "why": f"no answer for {BACK_SECONDS:g} s"})

    def require_owed(self, most: int | None = None, loads: int = 3) -> None:
        """Documents that are owed must be there, the latest first; some are loaded, each byte compared."""
        owed = list(self.ledger.owed().items())[:most]
        for at, (document, blocks) in enumerate(owed):
            self._require(document, blocks)
            if at < loads:
                self._use(document)
                with contextlib.suppress(KVStoreError):
                    self.asker.load(*document, self.chain(document))

    def _require(self, document: Document, blocks: int) -> None:
        hashes = self.chain(document)
        for _ in range(50):
            try:
                match = self._client.match(self.asker.keys[document[0]], hashes, 64 * len(hashes) + 1)
            except KVStoreError:
                match = None
            if match is not None and match.reason is not MissReason.UNAVAILABLE:
                break
            time.sleep(0.1)
        else:
            self.seen.stuck.append({"verb": "match", "why": "no answer to 50 tries"})
            return
        self.seen.checked += 1
        # Asked again: what was evicted or damaged meanwhile is no loss.
        if match.stored_blocks < blocks and match.stored_blocks < self.ledger.owed().get(document, 0):
            age = self.ledger.age(document)
            lost = {"document": document, "owed": blocks, "stored": match.stored_blocks, "age": age}
            self.seen.lost.append(lost | {"reason": match.reason, "behind": self.seen.course[-12:]})

    def require_writing(self) -> None:
        """What is new becomes durable soon, in a namespace that is new, too."""
        until = time.monotonic() + SETTLE_SECONDS
        space = replace(self.rng.choice(SPACES), salt=f"{next(self._seeds)}")
        while time.monotonic() < until:
            with contextlib.suppress(KVStoreError):
                key, nbytes = self._client.open_namespace(space), space.layout.block_bytes
                hashes = block_hashes(key, tokens(next(self._seeds), NEW_BLOCKS))
                self.ledger.stored(hashes, nbytes)
                if store_chain(self._client, key, hashes, nbytes=nbytes):
                    return
            time.sleep(0.1)
        why = f"nothing new is, within {SETTLE_SECONDS:g} s"
        self.seen.stuck.append({"verb": "durable", "why": why, "behind": self.seen.course[-4:]})

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """No worker has a request under way, and nothing is left of what they held."""
        for worker in self.workers:
            worker.order("pause")
        for worker in self.workers:
            if not worker.heard("paused", BACK_SECONDS + STUCK_SECONDS):
                self.seen.stuck.append({"verb": "pause", "why": f"worker {worker.pid} does not come to rest"})
        self.require_nothing_held()
        yield
        for worker in self.workers:
            worker.order("go")

    def require_nothing_held(self) -> None:
        """All leases, slots and rows are given back soon, and the tables are sound."""
        until = time.monotonic() + SETTLE_SECONDS
        while any((answer := self.daemon.tell())["held"].values()) and time.monotonic() < until:
            time.sleep(0.1)
        self.seen.leaked.update(answer["held"])
        self.seen.violated += answer["violated"]

    def left_open(self) -> list[str]:
        """Descriptors of a daemon whom everybody has left, beyond those that it began with."""
        self._client.close()
        until = time.monotonic() + SETTLE_SECONDS
        while (left := self.daemon.open_files()) > self._files_at_start and time.monotonic() < until:
            time.sleep(0.1)
        return [f"{left} descriptors, {self._files_at_start} at first"] if left > self._files_at_start else []

    def supervise(self, *, excused: bool = False) -> None:
        """Start a daemon that has died; unless excused that is a failure."""
        if not self.daemon.alive:
            if not excused:
                why = f"the daemon died with {self.daemon.died_of}; its log ends with"
                self.seen.deaths.append(f"{why} {self.daemon.last_words()!r}, behind {self.seen.course[-4:]}")
            self.daemon.start()
            self.await_daemon()


def _blocks(names: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(name) for name in names]


def block_sizes() -> set[int]:
    """Of all spaces."""
    return {space.layout.block_bytes for space in SPACES}
