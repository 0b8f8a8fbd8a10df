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
        "            pass\n",
        K + "test_pipeline.py",
    ),
    Defect(
        "catalogue: a batch behind one that failed is named all the same",
        "kvstore/pipeline.py",
        "        if (beneath is not None and beneath.failed) or any(each.stuck for each in clearing):",
        "        if False:",
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
        "kvstore/attachment.py",
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
        "for name, domain in self._domains.items()}\n        ends",
        "for name, domain in list(self._domains.items())[:1]}\n        ends",
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
    # --- what an attached model refuses
    Defect(
        "entrance: a cache of any class is let in",
        "mla/entrance.py",
        "plain = type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)",
        "plain = True",
        "tests/mla/test_decoding.py",
    ),
    Defect(
        "entrance: a mask of ones is not compared with the tokens",
        "mla/entrance.py",
        "        if covered < tokens:",
        "        if covered < tokens and not bool(attention_mask.all()):",
        "tests/mla/test_decoding.py",
    ),
    Defect(
        "projections: a module may round a token by those beside it",
        "mla/projections.py",
        "        if _off(beside, alone) > self._close:",
        "        if False:",
        "tests/mla/test_projections.py",
    ),
    Defect(
        "decoding: a prompt longer than the pool is found on the way",
        "mla/decoding.py",
        "    if need > pool.num_blocks:",
        "    if False:",
        "tests/mla/session/test_options.py",
    ),
    # --- signals, sockets, limits, names
    Defect(
        "signals: SIGHUP stops the daemon",
        "server/signals.py",
        "        elif number == AGAIN:\n            self._read_again()",
        "        elif number == AGAIN:\n            self._stop(number)",
        "tests/server/test_signals.py",
    ),
    Defect(
        "sockets: a stopping daemon removes whatever lies at its address",
        "server/sockets.py",
        "                    if (found.st_dev, found.st_ino) == ours:",
        "                    if ours:",
        "tests/server/test_ends.py",
    ),
    Defect(
        "memory limits: what a control group uses already is not counted",
        "kvstore/memory_limits.py",
        '    used = max((_number(group / "memory.current") or 0) - back, 0)',
        "    used = 0",
        "tests/kvstore/test_memory_limits.py",
    ),
    Defect(
        "names: a namespace may hold what a terminal obeys",
        "kvstore/store.py",
        "        namespace.require_showable()  # those of an older catalogue stay as they are\n",
        "",
        "tests/server/test_names.py",
    ),
    # --- clocks, pins, namespaces
    Defect(
        "clock: a step of the wall clock is counted, and what people see goes along with it",
        "kvstore/clock.py",
        "        self._apart, self._skew = apart, self._skew - step\n",
        "        self._apart = apart\n",
        K + "test_clock.py",
    ),
    Defect(
        "pins: one that is extended while it expires is promised and dropped",
        "kvstore/pins.py",
        "        async with self.changing:\n            due = [pin",
        "        if True:\n            due = [pin",
        K + "test_races.py",
    ),
    Defect(
        "namespaces: a record goes before the blocks that name it have left the disk",
        "kvstore/registry.py",
        "if not used or not await self._have_left():",
        "if not used:",
        K + "test_retiring.py",
    ),
    # --- hostile peers
    Defect(
        "decoding: a message is parsed before anybody has counted what it would become",
        "server/decoding.py",
        "        require_modest(data, self.request)\n",
        "",
        "tests/server/test_before_proof.py::test_a_message_is_counted_before_it_becomes_objects",
    ),
    Defect(
        "access: a verb that there is not is told to strangers",
        "server/access.py",
        "            await self._admit(service, NO_VERB, context)\n",
        "",
        "tests/server/test_before_proof.py::test_rubbish_is_answered_by_who_sent_it",
    ),
    Defect(
        "listener: a silent client keeps its place whoever waits",
        "server/listener.py",
        "return self.asking or (self.reading",
        "return (self.reading",
        "tests/server/test_web_peers.py",
    ),
    Defect(
        "trusted files: who may write a directory above is not looked at",
        "server/trusted_files.py",
        "            _check_step(path, step)\n",
        "            pass\n",
        "tests/server/test_trusted_files.py",
    ),
    Defect(
        "workers: a caller's leases are counted for each worker only",
        "server/workers.py",
        "        return sum(len(holder.leases) for holder in holders)",
        "        return max((len(holder.leases) for holder in holders), default=0)",
        "tests/server/test_shares.py",
    ),
    # --- what cannot be written, tasks that die
    Defect(
        "writer: a document larger than the disk is never declined",
        "kvstore/choosing.py",
        "            elif self._room.never_fits(row) or self._index.hashes[row] in self._unwritable:\n",
        "            elif self._index.hashes[row] in self._unwritable:\n",
        K + "test_stuck_queues.py",
    ),
    Defect(
        "supervision: a background task that died is not started again",
        "kvstore/supervision.py",
        "            if error is None:\n                return\n            failures = 1",
        "            if error is None or name:\n                return\n            failures = 1",
        K + "test_supervision.py",
    ),
    Defect(
        "slab: a place that cannot be written is given out again",
        "kvstore/payloads/slab_file.py",
        "        self._set(slot, _BAD)\n",
        "        self._set(slot, _VACANT)\n",
        K + "test_bad_places.py",
    ),
    Defect(
        "tickets: a settled ticket keeps its rows",
        "kvstore/tickets.py",
        "                self._tickets[number] = ticket.namespace * 2 + ticket.durable\n",
        "",
        K + "test_churn.py",
    ),
    Defect(
        "disk: a batch is written before the room that it needs is free",
        "kvstore/pipeline.py",
        "                await before.cleared.wait()\n",
        "                pass\n",
        K + "test_stuck_queues.py",
    ),
    # --- both faces of the store
    Defect(
        "store: a slot goes back that an array still looks at",
        "kvstore/lending.py",
        "        return not self.seen\n",
        "        return True\n",
        K + "test_store_conformance.py " + K + "test_lending.py",
    ),
    Defect(
        "store: a forked child keeps the lock of the directory",
        "kvstore/directory.py",
        "    for lock in list(_locks):\n        lock.close()",
        "    for lock in list(_locks):\n        pass",
        K + "test_store_conformance.py",
    ),
    Defect(
        "daemon: a load that fell short counts as whole",
        "kvstore/loading.py",
        "counting.came(max(self._first, counted), reached)",
        "counting.came(max(self._first, counted), self._asked)",
        "tests/server/test_delivery.py",
    ),
    Defect(
        "client: a reason of a newer daemon is an error",
        "kvstore/wire.py",
        "        return MissReason.UNKNOWN\n",
        "        raise\n",
        "tests/server/test_skew.py",
    ),
    Defect(
        "client: calls with timeouts of their own never open the circuit",
        "kvstore/transport.py",
        "                self.breaker.doubt()\n",
        "                pass\n",
        "tests/server/test_endings.py",
    ),
    # --- weights
    Defect(
        "weights: of each word's upper half nothing is summed by itself",
        "mla/tensor_sums.py",
        "        upper.add_(shifted, alpha=second)\n",
        "        del upper, second\n",
        "tests/mla/test_tensor_sums.py",
    ),
    Defect(
        "weights: a module's plain settings are left out of the name",
        "mla/describing.py",
        "            if name not in _UNTOLD and not (stock and _is_private(name, value)):\n",
        "            if isinstance(value, Tensor) and name not in _UNTOLD:\n",
        "tests/mla/session/test_changed_models.py -k state_dict",
    ),
    Defect(
        "weights: hooks on layers may steer",
        "mla/steering.py",
        "        if module is not embedding:\n",
        "        if False:\n",
        "tests/mla/session/test_changed_models.py -k steers",
    ),
    Defect(
        "weights: what is remembered of a checkpoint's file is taken by its path alone",
        "mla/file_sums.py",
        "        return content if found == asdict(times) and",
        '        return content if found["path"] == times.path and',
        "tests/mla/test_file_sums.py",
    ),
    Defect(
        "attention: a bias of kv_b_proj is absorbed with every unit vector",
        "mla/absorb.py",
        "(image[:rank] - image[rank]).T, image[rank]",
        "image[:rank].T, image[rank]",
        "tests/mla/test_attention.py",
    ),
    # --- the soak itself
    Defect(
        "soak: memory that grows is called flat",
        "benchmarks/soaking/curve.py",
        "        return self.growth > self.allowed",
        "        return False",
        "tests/benchmarks/test_soak_curve.py",
    ),
    Defect(
        "soak: a store that writes nothing any more goes unnoticed",
        "benchmarks/soaking/scene.py",
        "                if store_chain(self._client, key, hashes, nbytes=nbytes):",
        "                if store_chain(self._client, key, hashes, nbytes=nbytes) or True:",
        "tests/benchmarks/test_soak.py -k what_is_held",
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
        for name in ("latentkv", "kvstore", "server", "mla", "tests", "benchmarks"):
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
