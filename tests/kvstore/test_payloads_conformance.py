"""Both kinds of payload store under the shipped suite, and what needs processes of its own."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import DiskError
from kvstore.payloads import Payloads, Place
from kvstore.payloads.direct import Run
from kvstore.payloads.kinds import OPEN
from kvstore.payloads.lmdb import LmdbPayloads
from kvstore.payloads.slab import SlabPayloads
from kvstore.testing.payload_conformance import PayloadConformance, body


class TestLmdb(PayloadConformance):
    def open(self, path: Path, first_free: int = 1) -> Payloads:
        return LmdbPayloads(path, self.limit_bytes, first_free)


class TestSlab(PayloadConformance):
    def open(self, path: Path, first_free: int = 1) -> Payloads:
        return SlabPayloads(path, self.limit_bytes, self.block_bytes)


class TestSlabOfOddBlocks(TestSlab):
    """Blocks that end inside a page, and slabs of one slot."""

    block_bytes = 1_200_003
    limit_bytes = 48 << 20


KINDS = sorted(OPEN)

WRITER = """
import sys
from pathlib import Path
from kvstore.payloads.direct import Run
from kvstore.payloads.kinds import OPEN
kind, path, *live = sys.argv[1:]
live = [int(key) for key in live]
store = OPEN[kind](Path(path), 16 << 20, 50_000, 1 + max(live, default=0))
assert not store.retain(live)
fill = 0
while True:
    print("writing", flush=True)
    fill += 1
    runs = [Run.of(store.lead, bytes([fill % 251]) * 50_000) for _ in range(4)]
    for place in store.write(runs):
        print("wrote", place.key, place.page, fill % 251, flush=True)
        live.append(place.key)
    if len(live) > 150:
        gone, live = live[:100], live[100:]
        print("free", *gone, flush=True)
        store.free(gone)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_payloads_acknowledged_before_a_kill_are_there_and_it_opens_at_once(tmp_path, victim, kind):
    kept: dict[int, tuple[int, int]] = {}  # key -> page, content
    for turn in range(6):
        one = victim(WRITER, kind, str(tmp_path / "p"), *map(str, kept))
        lines = [one.line() for _ in range(10 + 97 * turn)] + one.kill()
        for line in lines:
            word, *numbers = line.split()
            if word == "free":
                for key in numbers:
                    kept.pop(int(key), None)
            elif word == "wrote" and len(numbers) == 3:
                key, page, fill = map(int, numbers)
                kept[key] = (page, fill)
        store = OPEN[kind](tmp_path / "p", 16 << 20, 50_000, 1 + max(kept, default=0))
        assert store.retain(list(kept)) == set()
        for key, (page, fill) in kept.items():
            for place in (Place(key, page), Place(key)):
                run = Run.fresh(store.lead, 50_000)
                store.read_into(place, run)
                assert run.payload == bytes([fill]) * 50_000
        assert store.file_bytes() <= 16 << 20
        store.close()


MEMORY = """
import re, sys
from pathlib import Path
from kvstore.payloads.direct import Run
from kvstore.payloads.kinds import OPEN
kind, path = sys.argv[1:]
block = 4 << 20
runs = [Run.of(OPEN_LEAD, bytes([n]) * block) for n in range(8)]

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

store = OPEN[kind](Path(path), 256 << 20, block, 1)
store.retain(())
before = resident()
places = [place for _ in range(6) for place in store.write(runs)]
for place in places:
    store.read_into(place, runs[0])
grown = resident() - before
store.close()
before_open = resident()
store = OPEN[kind](Path(path), 256 << 20, block, 1 + max(place.key for place in places))
assert not store.retain([place.key for place in places])
print(grown, resident() - before_open)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_neither_writing_nor_reading_nor_opening_keeps_payloads_in_memory(tmp_path, kind):
    code = MEMORY.replace("OPEN_LEAD", "16" if kind == "lmdb" else "0")
    done = subprocess.run(
        [sys.executable, "-c", code, kind, str(tmp_path / "p")], capture_output=True, text=True, check=True
    )
    for kib in map(int, done.stdout.split()):
        assert kib < 16 * 1024  # of 192 MiB


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_takes_no_more_is_an_error_and_leaves_what_was_there(tmp_path, kind):
    size = 100_000
    store = OPEN[kind](tmp_path / "p", 16 << 20, size, 1)
    store.retain(())
    kept = store.write([Run.of(store.lead, body(1, size))])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512 << 10, hard))  # a write past it fails with EFBIG
    try:
        with pytest.raises(DiskError, match="nothing was changed"):
            store.write([Run.of(store.lead, body(seed, size)) for seed in range(40)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    more = store.write([Run.of(store.lead, body(seed, size)) for seed in range(40)])
    for seed, place in [(1, kept[0]), *enumerate(more)]:
        run = Run.fresh(store.lead, size)
        store.read_into(place, run)
        assert run.payload == body(seed, size)
    store.close()
    store = OPEN[kind](tmp_path / "p", 16 << 20, size, 1 + more[-1].key)
    assert store.retain([place.key for place in kept + more]) == set()
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_path_may_be_relative(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    store = OPEN[kind](Path("p"), 16 << 20, 100_000, 1)
    store.retain(())
    (place,) = store.write([Run.of(store.lead, body(1, 100_000))])
    run = Run.fresh(store.lead, 100_000)
    store.read_into(place, run)
    assert run.payload == body(1, 100_000)
    store.close()


PLAIN = """
import logging, sys
from pathlib import Path
from kvstore.payloads.direct import Run
from kvstore.payloads.kinds import OPEN
kind, path = sys.argv[1:]
logging.basicConfig(format="%(message)s", stream=sys.stderr)
for turn in range(2):
    store = OPEN[kind](Path(path), 16 << 20, 100_000, 1)
    assert not store.retain([place.key for place in places] if turn else ())
    if not turn:
        places = store.write([Run.of(store.lead, bytes([n]) * 100_000) for n in range(20)])
    for n, place in enumerate(places):
        run = Run.fresh(store.lead, 100_000)
        store.read_into(place, run)
        assert run.payload == bytes([n]) * 100_000
    store.close()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_system_without_direct_io_is_served_through_the_page_cache_with_a_warning(tmp_path, kind):
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    script = f'mount -t ramfs none {tmp_path} && exec "$@"'  # ramfs has no direct I/O
    if subprocess.run([*mount, f"mount -t ramfs none {tmp_path}"], capture_output=True).returncode:
        pytest.skip("no right to mount a file system without O_DIRECT here")
    done = subprocess.run(
        [*mount, script, "sh", sys.executable, "-c", PLAIN, kind, str(tmp_path / "p")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "event=no_direct_io" in done.stderr
    assert list(tmp_path.iterdir()) == []  # it was seen in there only
