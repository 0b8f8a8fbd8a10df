"""Defects that were seeded by hand, one at a time, and the tests that must fail for each.

    python -m tests.defects                 all of them, in a scratch copy of the tree
    python -m tests.defects left_out_sync   those whose name has this in it

Prints a row of docs/reliability.md for each; the exit status is 1 if the tests pass with one of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 170  # in which the tests must fail


@dataclass(frozen=True)
class Defect:
    """``old``, which stands once in ``file``, becomes ``new``; one of ``tests`` must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    def applied(self) -> str:
        text = (ROOT / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} stands {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


K = "tests/kvstore/"
DOMAINS = "tests/server/test_domains.py"
DEFECTS = (
    # --- arena
    Defect(
        "arena: a held CLEAN slot may be evicted",
        "kvstore/arena.py",
        "if found.holders == 0 and found.state in (SlotState.CLEAN, SlotState.LOOSE):",
        "if found.state in (SlotState.CLEAN, SlotState.LOOSE):",
        K + "test_arena.py",
    ),
    Defect(
        "arena: a slot whose block is gone is free while somebody holds it",
        "kvstore/arena.py",
        "        if found.holders:\n            self._move(slot, found, SlotState.ORPHAN)",
        "        if False:\n            self._move(slot, found, SlotState.ORPHAN)",
        K + "test_arena.py",
    ),
    Defect(
        "arena: an extent is said to be full one slot early",
        "kvstore/arena.py",
        "if extent.used == extent.pages // mine.pages:",
        "if extent.used == extent.pages // mine.pages - 1:",
        K + "test_arena.py",
    ),
    Defect(
        "arena: dirty blocks may leave though the disk is well",
        "kvstore/arena.py",
        "        if evicted is None and dirty:",
        "        if evicted is None:",
        K + "test_arena.py",
    ),
    # --- leases
    Defect(
        "leases: a mapped worker's slots are freed when its lease expires",
        "kvstore/store.py",
        "        if lease.holder.mapped:\n            # The worker may",
        "        if False:\n            # The worker may",
        K + "test_leases.py",
    ),
    Defect(
        "leases: a broken stream's slots are freed before its worker is heard of",
        "kvstore/loading.py",
        "if returned or not self._lease.holder.mapped or not self._slots or self._lease.ended:",
        "if True:",
        K + "test_leases.py tests/server/test_failures.py",
    ),
    Defect(
        "leases: use does not renew a lease",
        "kvstore/leases.py",
        "        lease.expires = now + self._seconds",
        "        del now",
        K + "test_leases.py",
    ),
    Defect(
        "leases: what a worker that dies was filling stays pending",
        "kvstore/store.py",
        "        self._stop_filling(lease)\n        self._leases.drop_slots(lease)",
        "        self._leases.drop_slots(lease)",
        K + "test_leases.py",
    ),
    Defect(
        "leases: the quota counts no block",
        "kvstore/leases.py",
        "        lease.holder.held_bytes += lease.block_bytes",
        "        lease.holder.held_bytes += 0",
        K + "test_leases.py",
    ),
    # --- catalogue
    Defect(
        "catalogue: a record's checksum is not compared",
        "kvstore/catalog.py",
        'found["record"][digests == found["check"]]',
        'found["record"][digests == digests]',
        K + "test_catalog.py",
    ),
    Defect(
        "catalogue: a block is named before its parent",
        "kvstore/pipeline.py",
        "            await batch.before.done.wait()\n",
        "",
        K + "test_pipeline.py",
    ),
    Defect(
        "catalogue: a batch behind one that failed is named all the same",
        "kvstore/pipeline.py",
        "            if batch.before.failed:",
        "            if False:",
        K + "test_pipeline.py",
    ),
    Defect(
        "catalogue: commits to a file that was removed are confirmed",
        "kvstore/catalog.py",
        "                    self._require_name()\n",
        "",
        K + "test_catalog.py tests/server/test_full_disk.py",
    ),
    Defect(
        "catalogue: payloads are freed before the catalogue has forgotten them",
        "kvstore/pipeline.py",
        "            await self._in(self._catalog, self._disk.forget, batch.leaving.freed)\n",
        "            await self._in(self._payloads, self._disk.free, batch.leaving.freed)\n"
        "            await self._in(self._catalog, self._disk.forget, batch.leaving.freed)\n",
        K + "test_store_faults.py",
    ),
    Defect(
        "catalogue: two daemons may have one directory",
        "kvstore/directory.py",
        "        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)\n",
        K + "test_catalog.py",
    ),
    # --- payloads
    Defect(
        "payloads: an fdatasync is left out (slab)",
        "kvstore/payloads/slab_file.py",
        "        self.file.sync()\n",
        "        pass\n",
        "tests/crash/test_power_loss.py",
    ),
    Defect(
        "payloads: an fdatasync is left out (LMDB)",
        "kvstore/payloads/lmdb_file.py",
        "            readahead=False,\n",
        "            readahead=False,\n            sync=False,\n",
        "tests/crash/test_power_loss.py",
    ),
    Defect(
        "payloads: the name of a new slab is not synced",
        "kvstore/payloads/slab.py",
        "            if self._names_changed:",
        "            if False:",
        "tests/crash/test_power_loss.py",
    ),
    Defect(
        "payloads: one write's sync is told what another lost, and that is confirmed",
        "kvstore/payloads/slab.py",
        "            if self._sync_failures != failures:",
        "            if False:",
        K + "test_payloads_slab.py",
    ),
    Defect(
        "payloads: what is read is not compared with its checksum",
        "kvstore/disk.py",
        "        if found != stored.checksum:",
        "        if False:",
        K + "test_store_faults.py",
    ),
    Defect(
        "payloads: a key is given out a second time",
        "kvstore/payloads/lmdb.py",
        "        self._next = max(first_free, last + 1, 1)",
        "        self._next = max(last + 1, 1)",
        K + "test_payloads_lmdb.py " + K + "test_payloads_conformance.py",
    ),
    Defect(
        "payloads: a slot in use is free after a start",
        "kvstore/payloads/slab_file.py",
        "        state[slots[there]] = _USED",
        "        state[slots[there][1:]] = _USED",
        K + "test_payloads_conformance.py",
    ),
    Defect(
        "payloads: a deleted file is not noticed",
        "kvstore/payloads/lmdb_file.py",
        "if self._whole and (short or stat.st_nlink == 0):",
        "if self._whole and short:",
        K + "test_payloads_conformance.py",
    ),
    # --- index
    Defect(
        "index: a chain is followed into another namespace",
        "kvstore/prefix_index.py",
        "        foreign = view(self.namespace)[rows] != namespace\n",
        "        foreign = view(self.namespace)[rows] < 0\n",
        K + "test_prefix_index.py",
    ),
    Defect(
        "index: a block that others stand on leaves",
        "kvstore/prefix_index.py",
        "(view(self.children) == 0) & (view(self.holds) == 0)\n",
        "view(self.holds) == 0\n",
        K + "test_eviction.py",
    ),
    Defect(
        "index: a block that a lease keeps leaves",
        "kvstore/prefix_index.py",
        "(view(self.children) == 0) & (view(self.holds) == 0)\n",
        "view(self.children) == 0\n",
        K + "test_eviction.py",
    ),
    Defect(
        "index: a hole with children is removed",
        "kvstore/prefix_index.py",
        "self.state[row] == BlockState.ABSENT and not self.children[row] and not self.holds[row]",
        "self.state[row] == BlockState.ABSENT and not self.holds[row]",
        K + "test_prefix_index.py",
    ),
    Defect(
        "index: a prompt is a hit to its last token",
        "kvstore/matching.py",
        "max(self.tokens - 1, 0))",
        "max(self.tokens, 0))",
        K + "test_matching.py",
    ),
    Defect(
        "index: the answer's unit counts the token without a latent",
        "kvstore/units.py",
        "    cached = max(total - 1, 0)",
        "    cached = max(total, 0)",
        K + "test_units.py",
    ),
    Defect(
        "index: a prompt of a multiple of 64 tokens lacks its last block",
        "kvstore/hashing.py",
        "    for index in range(len(data) // step):",
        "    for index in range((len(data) - 1) // step):",
        K + "test_hashing.py",
    ),
    # --- client and daemon
    Defect(
        "client: bytes that came damaged are delivered",
        "kvstore/remote_load.py",
        "xxhash.xxh3_64_intdigest(buffer) != chunk.checksum:",
        "not chunk.last:",
        "tests/server/test_failures.py",
    ),
    Defect(
        "client: an arena is kept whose daemon does not answer",
        "kvstore/client.py",
        "            # Slots may be announced or reserved for us without our knowing.\n"
        "            if mapping is not None:\n",
        "            # Slots may be announced or reserved for us without our knowing.\n"
        "            if False:\n",
        "tests/server/test_failures.py",
    ),
    Defect(
        "client: a fork keeps the connection alive that frees the slots",
        "kvstore/mapping.py",
        "    for mapping in list(_mappings):\n        mapping.close_in_child()",
        "    for mapping in list(_mappings):\n        pass",
        "tests/server/test_failures.py",
    ),
    Defect(
        "client: a silent daemon costs every call its deadline",
        "kvstore/transport.py",
        "        except DeadlineExceeded:\n            self.breaker.trip()\n            raise",
        "        except DeadlineExceeded:\n            raise",
        "tests/server/test_failures.py",
    ),
    Defect(
        "daemon: blocks that nobody uploaded are committed",
        "server/workers.py",
        "            if (lease, block) not in uploaded:",
        "            if False:",
        "tests/server/test_failures.py",
    ),
    Defect(
        "daemon: a piece of an upload may be left out",
        "server/streams.py",
        "        if not self._block or piece.offset != self._done:",
        "        if not self._block:",
        "tests/server/test_failures.py",
    ),
    Defect(
        "daemon: bytes that came damaged are stored",
        "server/streams.py",
        "        if self._hasher.intdigest() != checksum:",
        "        if False:",
        "tests/server/test_failures.py",
    ),
    # --- session
    Defect(
        "domains: a worker gets the arena of the first one",
        "server/handover.py",
        "domain.store.arena)",
        "self._domains['default'].store.arena)",
        DOMAINS,
    ),
    Defect(
        "domains: a call is answered by the first one",
        "server/domains.py",
        "behind[caller().domain]",
        "behind['default']",
        DOMAINS,
    ),
    Defect(
        "domains: all tenants are those of other domains, too",
        "server/credentials.py",
        "return tenant not in self.foreign if self.tenants is None",
        "return True if self.tenants is None",
        DOMAINS,
    ),
    Defect(
        "domains: what was among all tenants of one may move to another",
        "server/credentials.py",
        "(rest if subject[0] == _TENANT else None) or ",
        "",
        DOMAINS,
    ),
    Defect(
        "domains: only the first one is closed in order",
        "server/lifecycle.py",
        "for domain in self._domains.values())  # all",
        "for domain in list(self._domains.values())[:1])  # all",
        DOMAINS,
    ),
    Defect(
        "session: pool blocks are not kept while they wait to be stored",
        "mla/storing.py",
        "        pool.retain(self._blocks)\n",
        "",
        "tests/mla/session/test_store_queue.py",
    ),
    Defect(
        "session: a block that another worker fills counts as stored",
        "mla/storing.py",
        "    return block.state is ReserveState.PRESENT or block.data is not None",
        "    return block.state is not ReserveState.RETRY",
        "tests/mla/session/test_store_queue.py tests/mla/session/test_failing_stores.py",
    ),
    Defect(
        "session: blocks in a wrong order are taken",
        "mla/prefix.py",
        "    if [block.index for block in batch] != list(range(expected, expected + len(batch))):",
        "    if False:",
        "tests/mla/session/test_failing_stores.py",
    ),
    Defect(
        "session: an exact session hits inside a chunk",
        "mla/session.py",
        "        self._align = prefill_chunk if exact else size",
        "        self._align = size",
        "tests/mla/session/test_exact_sessions.py",
    ),
    Defect(
        "session: a load that fell short counts as whole",
        "mla/prefix.py",
        "        for block, block_hash in zip(fresh[:loaded], hashes[first:], strict=False):",
        "        loaded = len(fresh)\n"
        "        for block, block_hash in zip(fresh[:loaded], hashes[first:], strict=False):",
        "tests/mla/session/test_failing_stores.py",
    ),
)


def caught_by(defect: Defect, scratch: Path) -> str:
    """Name of the first test that fails with the defect in a copy of the tree; empty if none does."""
    (scratch / defect.file).write_text(defect.applied())
    try:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *defect.tests.split(),
        ]
        ran = subprocess.run(
            command,
            cwd=scratch,
            env=os.environ | {"PYTHONPATH": str(scratch)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "a test that does not end"
    finally:
        shutil.copy(ROOT / defect.file, scratch / defect.file)
    failed = re.search(r"^(?:FAILED|ERROR) \S+/(\S+?)(?: - .*)?$", ran.stdout, re.MULTILINE)
    return failed[1] if failed else "" if ran.returncode == 0 else f"exit status {ran.returncode}"


def main(words: list[str]) -> int:
    chosen = [defect for defect in DEFECTS if not words or any(word in defect.name for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="defects-") as scratch:
        for name in ("kvstore", "server", "mla", "tests", "benchmarks"):
            shutil.copytree(ROOT / name, Path(scratch) / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, scratch)
        for defect in chosen:
            test = caught_by(defect, Path(scratch))
            missed += not test
            print(f"| {defect.name} | {f'`{test}`' if test else '**nothing**'} |", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
