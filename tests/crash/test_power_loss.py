"""Power loss at every point of a write: the store opens, all is right, and what was confirmed is there."""

import os
import random
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest

from kvstore.checking import check
from kvstore.embedded import Embedded
from kvstore.errors import KVStoreError
from kvstore.hashing import block_hashes
from kvstore.namespace import Namespace
from kvstore.records import FaultKind
from kvstore.settings import MIB, StoreSettings
from kvstore.testing.chains import OTHER, load_chain, store_chain, tokens
from tests.crash.power import Choice, Disk, Op, Record, everything, nothing, recording, some
from tests.server.conftest import Fleet, flag_maker

LAYOUT = OTHER
BLOCKS = 4  # of a document
DOCUMENTS = 96  # more than the disk holds
OWED = 12  # of those confirmed last; none of them can have been evicted, with a disk of over sixty
WRITERS = 3
DISK_BYTES = 16 * MIB


@dataclass(frozen=True)
class History:
    """What a daemon did to its disk, and which document was confirmed when."""

    kind: str
    root: Path
    records: list[Record]
    confirmed: list[tuple[int, int]]  # where the log ended then, and the document's number

    def owed(self, at: int) -> list[int]:
        """Documents that must be there when power is lost behind this record."""
        return [number for end, number in self.confirmed if end <= self.records[at].end][-OWED:]


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``recorder.c``, compiled."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler, and the recorder is written in C")
    library = tmp_path_factory.mktemp("recorder") / "recorder.so"
    source = Path(__file__).with_name("recorder.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", library, source], check=True
    )
    return library


@pytest.fixture(scope="module", params=["lmdb", "slab"])
def history(
    request: pytest.FixtureRequest, recorder: Path, tmp_path_factory: pytest.TempPathFactory
) -> History:
    """A daemon stores documents of several workers at once, until old ones must leave; then it is killed."""
    work = tmp_path_factory.mktemp("power")
    root, log = work / "disk", work / "log"
    root.mkdir()
    fleet = Fleet()
    with flag_maker() as flags, pytest.MonkeyPatch.context() as patch:
        for name, value in (("LD_PRELOAD", recorder), ("RECORD_ROOT", root), ("RECORD_LOG", log)):
            patch.setenv(name, str(value))
        settings = {"host_bytes": "4MiB", "disk_bytes": DISK_BYTES, "interval": 0}
        daemon = fleet.daemon(*flags(data=root / "data", payloads=request.param, **settings))
        patch.undo()
        confirmed = _store_all(fleet, daemon.url, log)
        assert fleet.connect(daemon.url).status().counters["disk_evicted_blocks"] > 0
        fleet.close()
    return History(request.param, root, recording(log), confirmed)


def _store_all(fleet: Fleet, url: str, log: Path) -> list[tuple[int, int]]:
    confirmed: list[tuple[int, int]] = []
    numbers = iter(range(DOCUMENTS))

    def work() -> None:
        client = fleet.connect(url)
        namespace = client.open_namespace(Namespace(LAYOUT))
        for number in numbers:
            hashes = block_hashes(namespace, tokens(number, BLOCKS))
            assert store_chain(client, namespace, hashes, nbytes=LAYOUT.block_bytes)
            confirmed.append((log.stat().st_size, number))

    threads = [threading.Thread(target=work) for _ in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(confirmed) == DOCUMENTS
    return sorted(confirmed)


def what_is_wrong(data: Path, kind: str, owed: Sequence[int]) -> str:
    """Open what a power loss left; empty if it is as it must be."""
    try:
        if (data / "catalog" / "data.mdb").is_file():
            # A payload file that was still being made is one that no block is in.
            report = check(data)
            faults = [fault for fault in report.faults if fault.kind is not FaultKind.FILE_DAMAGED]
            if faults or report.cut_off:
                return f"check: {faults[:3]}, {report.cut_off} cut off"
        settings = StoreSettings(data, host_bytes=MIB, disk_bytes=DISK_BYTES, payloads=kind, readers=2)
        with Embedded(settings) as store:
            namespace = store.open_namespace(Namespace(LAYOUT))
            for number in (*owed, *range(0, DOCUMENTS, 16)):
                hashes = block_hashes(namespace, tokens(number, BLOCKS))
                if load_chain(store, namespace, hashes) < BLOCKS and number in owed:
                    return f"document {number} was confirmed and is not there"
            fresh = block_hashes(namespace, tokens(DOCUMENTS, 2))
            if not store_chain(store, namespace, fresh, nbytes=LAYOUT.block_bytes):
                return "it cannot be written"
    except (KVStoreError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Examiners:
    """Processes that look at states of a disk: what is left after a missing sync may kill who opens it."""

    def __init__(self) -> None:
        shm = Path("/dev/shm")
        self._place = tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None)
        self._count = 0
        self._running: list[tuple[str, Path, Future[str]]] = []
        self.found: list[str] = []
        self._pool = self._start()

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(2, mp_context=get_context("spawn"))

    def examine(self, history: History, disk: Disk, at: int, choice: Choice, name: str) -> None:
        """Lose power behind record ``at``, with the next one under way."""
        self._count += 1
        into = Path(self._place.name) / str(self._count)
        into.mkdir()
        following = history.records[at + 1] if at + 1 < len(history.records) else None
        disk.lose_power(into, choice, following)
        task = self._pool.submit(what_is_wrong, into / "data", history.kind, history.owed(at))
        self._running.append((f"record {at}, {name}", into, task))
        while len(self._running) > 4:
            self._collect()

    def _collect(self) -> None:
        name, into, task = self._running.pop(0)
        error = task.exception()  # a broken tree may show itself as any
        wrong = repr(error) if error is not None else task.result()
        if isinstance(error, BrokenProcessPool):  # who opened it has died
            self._pool.shutdown()
            self._pool = self._start()
        if wrong:
            self.found.append(f"{name}: {wrong}")
        shutil.rmtree(into)

    def close(self) -> None:
        while self._running:
            self._collect()
        self._pool.shutdown()
        self._place.cleanup()


@pytest.fixture
def examiners() -> Iterator[Examiners]:
    """Two processes."""
    made = Examiners()
    yield made
    made.close()


def points(history: History, rng: random.Random) -> set[int]:
    """Records behind which power is lost: all of a beginning and of a whole write, others at random."""
    last = len(history.records) - 1
    renamed = [at for at, record in enumerate(history.records) if record.op is not Op.WRITE]
    late = renamed[len(renamed) * 3 // 4]
    return {*range(40), *range(late, late + 40), *rng.sample(range(last), 10), last} & {*range(last + 1)}


def replayed(
    history: History, at: set[int], left_out: Callable[[Record], bool] = lambda record: False
) -> Iterator[tuple[int, Disk]]:
    """The disk behind each of these records; calls that are ``left_out`` were never made."""
    disk = Disk(history.root)
    for number, record in enumerate(history.records):
        if not left_out(record):
            disk.replay(record)
        if number in at:
            yield number, disk


def test_whatever_of_the_unsynced_a_power_loss_takes_nothing_is_wrong_and_all_that_was_confirmed_is_there(
    history: History, examiners: Examiners
) -> None:
    rng = random.Random(history.kind)
    for at, disk in replayed(history, points(history, rng)):
        examiners.examine(history, disk, at, nothing, "nothing unsynced")
        examiners.examine(history, disk, at, some(rng), "some unsynced")
        if at % 20 == 0:
            examiners.examine(history, disk, at, everything, "everything")
    examiners.close()
    assert examiners.found == []


@pytest.mark.parametrize("missing", ["payloads", "catalog", "names"])
def test_a_sync_that_is_left_out_is_found(history: History, examiners: Examiners, missing: str) -> None:
    opened: dict[int, Record] = {}

    def left_out(record: Record) -> bool:
        if record.op is Op.OPEN:
            opened[record.file] = record
        if record.op not in (Op.SYNC_BEGIN, Op.SYNC_END):
            return False
        of_names = bool(opened[record.file].flags & os.O_DIRECTORY)
        return of_names if missing == "names" else missing in opened[record.file].path.parts and not of_names

    rng = random.Random(history.kind)
    late = [number for number in range(len(history.records)) if history.owed(number)]
    for at, disk in replayed(history, set(rng.sample(late, 80)), left_out):
        examiners.examine(history, disk, at, some(rng), "some unsynced")
        if examiners.found:
            return
    examiners.close()
    assert examiners.found
