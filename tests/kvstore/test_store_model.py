"""The embedded store against a dictionary: whatever happens, a hit has the right bytes."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from kvstore.api import ReserveState
from kvstore.errors import ParentMissing
from kvstore.hashing import ROOT, block_hashes
from kvstore.namespace import Namespace
from kvstore.payloads.kinds import OPEN
from kvstore.settings import PayloadKind
from kvstore.testing.faults import Faults
from kvstore.units import UnitKind, UnitMark
from tests.kvstore.blocks import OTHER, SMALL, content, load_chain, open_store

LAYOUTS = (SMALL, OTHER)
END = UnitKind.REQUEST_END
PIECE = 12  # blocks of one letter


class StoreMachine(RuleBasedStateMachine):
    """Documents are words; a word is stored as a chain of PIECE blocks a letter.

    Words share prefixes, so chains fork. HOST holds seven pieces and DISK about eighty.
    The model holds what was committed; eviction may take any of it, so what must hold is:
    a match is a prefix of what was committed and ends at a mark, everything it promises can
    be loaded with the right bytes, and in a disk that had room for all nothing is missing.
    """

    kind: PayloadKind = "lmdb"
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="latentkv-model-"))
        self.faults = Faults(OPEN[self.kind])
        self.committed: list[set[bytes]] = [set(), set()]
        self.marked: list[set[bytes]] = [set(), set()]
        self.sure: set[bytes] = set()  # durable, and nothing was evicted since
        self.known: dict[tuple[int, str], list[bytes]] = {}
        self.held: dict[int, tuple[int, list[bytes]]] = {}  # lease -> (layout, blocks that it fills)
        self.open()

    def open(self) -> None:
        self.store = open_store(self.path, self.faults, payloads=self.kind, drain_seconds=10.0)
        self.spaces = [self.store.open_namespace(Namespace(layout=layout)) for layout in LAYOUTS]

    def teardown(self) -> None:
        self.faults.fail_writes = self.faults.fail_reads = False
        self.store.close()
        shutil.rmtree(self.path)

    def hashes(self, which: int, word: str) -> list[bytes]:
        if (which, word) not in self.known:
            ids = [ord(letter) * 1000 + n for letter in word for n in range(64 * PIECE)]
            self.known[which, word] = block_hashes(self.spaces[which], ids)
        return self.known[which, word]

    def shut_out(self, which: int) -> bool:
        """Whether slots of the other layout are held: this arena has one extent, so all others wait."""
        return any(filling and layout != which for layout, filling in self.held.values())

    words = st.text("abc", min_size=1, max_size=4)
    layouts = st.sampled_from([0, 0, 0, 1])

    @rule(which=layouts, word=words, unit=st.booleans())
    def store_word(self, which: int, word: str, unit: bool) -> None:
        if self.shut_out(which):
            return
        hashes, space = self.hashes(which, word), self.spaces[which]
        parent, lease, tickets, at = ROOT, 0, [], 0
        while at < len(hashes):
            answer = self.store.reserve(space, parent, hashes[at : at + PIECE], lease=lease)
            lease = answer.lease
            moved = answer.blocks[: len(answer.blocks) - answer.retry]
            filled = [block.hash for block in moved if block.state is ReserveState.FILL]
            for block in moved:
                if block.data is not None:
                    block.data[:] = content(block.hash, LAYOUTS[which].block_bytes)
            if not moved:
                break  # the arena is full of what others hold
            last = at + len(moved) == len(hashes)
            marks = [UnitMark(hashes[-1], END)] if unit and last else []
            tickets.append((self.store.commit(lease, filled, marks), filled))
            self.committed[which] |= set(filled)
            if marks:
                self.marked[which].add(hashes[-1])
            at += len(moved)
            parent = hashes[at - 1]
        # A disk that fails answers only with its next attempt.
        for ticket, filled in tickets if self.store.status().mode == "ok" else ():
            if self.store.durable(ticket):
                self.sure |= set(filled)
        self.store.release(lease)

    @rule(target=leases, which=layouts, word=words)
    def reserve(self, which: int, word: str) -> int:
        """Another worker takes slots and does not come to an end."""
        hashes = self.hashes(which, word)
        match = self.store.match(self.spaces[which], hashes, 64 * len(hashes) + 1)
        at = min(match.stored_blocks, len(hashes) - 1)
        parent = hashes[at - 1] if at else ROOT
        answer = self.store.reserve(self.spaces[which], parent, hashes[at : at + 3])
        filling = [block for block in answer.blocks if block.state is ReserveState.FILL]
        for block in filling:
            assert block.data is not None
            block.data[:] = content(block.hash, LAYOUTS[which].block_bytes)
        self.held[answer.lease] = (which, [block.hash for block in filling])
        return answer.lease

    @rule(lease=leases)
    def commit(self, lease: int) -> None:
        if lease in self.held:
            which, filling = self.held[lease]
            self.store.commit(lease, filling[:2])
            self.committed[which] |= set(filling[:2])
            self.held[lease] = (which, filling[2:])

    @rule(lease=leases)
    def release(self, lease: int) -> None:
        if self.held.pop(lease, None):
            self.store.release(lease)

    @rule(which=layouts, word=words, extra=st.integers(0, 2))
    def hit(self, which: int, word: str, extra: int) -> None:
        if self.shut_out(which):
            return
        hashes, space = self.hashes(which, word), self.spaces[which]
        match = self.store.match(space, hashes, 64 * len(hashes) + extra)
        assert set(hashes[: match.stored_blocks]) <= self.committed[which]
        if match.unit is not None:
            assert match.unit == hashes[match.unit_blocks - 1]
            assert match.unit in self.marked[which] or self.parts(which, match.unit)
        limit = (64 * len(hashes) + extra - 1) // 64
        assert match.blocks == min(match.unit_blocks, limit)
        assert match.host_blocks + match.disk_blocks == match.blocks
        usable = load_chain(self.store, space, hashes[: match.blocks])
        if not self.faults.fail_reads and not self.faults.fail_writes and self.store.status().mode == "ok":
            assert usable == match.blocks

    def parts(self, which: int, block: bytes) -> bool:
        """Whether chains part behind this block, so that it may bear a mark nobody made."""
        chains = [hashes for (of, _), hashes in self.known.items() if of == which]
        return any(block in hashes[PIECE - 1 :: PIECE] for hashes in chains)

    @rule(which=layouts, word=words)
    def meant_to_store(self, which: int, word: str) -> None:
        hashes = self.hashes(which, word)
        self.store.match(self.spaces[which], hashes, 64 * len(hashes), store=True)

    @rule(which=layouts, word=words)
    def load_all_that_is_stored(self, which: int, word: str) -> None:
        if self.shut_out(which):
            return
        hashes = self.hashes(which, word)
        assert set(hashes[: load_chain(self.store, self.spaces[which], hashes)]) <= self.committed[which]

    @precondition(lambda self: not self.faults.fail_writes)
    @rule()
    def restart(self) -> None:
        self.store.close()
        self.held.clear()
        before = self.store
        self.open()
        assert self.store is not before
        counters = self.store.status().counters
        assert counters["lost_payloads"] == counters["catalog_skipped"] == 0

    @rule(fail=st.booleans())
    def disk_writes(self, fail: bool) -> None:
        self.faults.fail_writes = fail
        if fail:
            self.sure.clear()

    @rule(fail=st.booleans())
    def disk_reads(self, fail: bool) -> None:
        self.faults.fail_reads = fail

    @rule(which=layouts, word=words)
    def a_wrong_parent(self, which: int, word: str) -> None:
        try:
            self.store.reserve(self.spaces[1 - which], self.hashes(which, word)[-1], [])
        except ParentMissing:
            return
        raise AssertionError("a block of another namespace was taken for a parent")

    @invariant()
    def sound(self) -> None:
        assert self.store.check() == []
        status = self.store.status()
        assert status.disk.used_bytes <= status.disk.capacity_bytes
        assert status.host.used_bytes <= status.host.capacity_bytes
        if status.counters.get("disk_evicted_blocks"):
            self.sure.clear()
        index = self.store._store._index
        if not self.faults.fail_writes:
            assert all(index.find(block) != -1 for block in self.sure)


class SlabStoreMachine(StoreMachine):
    """The same over slabs."""

    kind = "slab"


TestStore = StoreMachine.TestCase
TestSlabStore = SlabStoreMachine.TestCase
TestStore.settings = TestSlabStore.settings = hypothesis_settings(
    max_examples=8, stateful_step_count=30, deadline=None
)
