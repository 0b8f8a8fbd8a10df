"""Any store against a dictionary, as a hypothesis state machine: whatever happens, a hit has the right bytes.

    class Machine(StoreMachine):
        def open(self, path):
            return EmbeddedSubject(path, disk_bytes=MACHINE_DISK_BYTES)

    TestMine = Machine.TestCase

Needs hypothesis and pytest.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from kvstore.api import ReserveState
from kvstore.errors import KVStoreError, LeaseUnknown, NotReserved, ParentMissing, UnitUnknown
from kvstore.hashing import ROOT, block_hashes
from kvstore.namespace import Namespace
from kvstore.settings import MIB
from kvstore.testing.chains import OTHER, SMALL, content, load_chain
from kvstore.testing.faults import Faults
from kvstore.testing.subjects import Subject
from kvstore.units import UnitKind, UnitMark

LAYOUTS = (SMALL, OTHER)
PIECE = 12  # blocks of one letter
MACHINE_DISK_BYTES = 16 * MIB  # about eighty pieces, so that some are evicted; HOST holds seven


class StoreMachine(RuleBasedStateMachine):
    """Documents are words; a word is stored as a chain of PIECE blocks a letter, so chains fork.

    The model holds what was committed. Eviction may take any of it, and so may a damaged byte;
    what must hold is: a match is a prefix of what was committed and ends at a mark, all that it
    promises can be loaded with the right bytes, and what is durable and neither evicted nor
    damaged is there. Invariants are checked after every step, as far as they can be seen.
    """

    most_restarts = 100  # in one run; fewer where a restart takes long

    leases: Bundle[int] = Bundle("leases")
    words = st.text("abc", min_size=1, max_size=4)
    layouts = st.sampled_from([0, 0, 0, 1])

    def open(self, path: Path) -> Subject:
        """The store under test, empty, with its data in this directory."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="latentkv-model-"))
        self.subject = self.open(self.path)
        self.committed: list[set[bytes]] = [set(), set()]
        self.marked: list[set[bytes]] = [set(), set()]
        self.sure: set[bytes] = set()  # durable, and nothing was evicted since
        self.damaged: set[bytes] = set()  # on disk, not stored again since
        self.known: dict[tuple[int, str], list[bytes]] = {}
        self.held: dict[int, tuple[int, list[bytes]]] = {}  # lease -> (layout, blocks that it fills)
        self.was_damaged = False
        self.restarts = 0
        self.meet()

    def meet(self) -> None:
        """Have the store of this run."""
        self.store = self.subject.store
        self.spaces = [self.store.open_namespace(Namespace(layout=layout)) for layout in LAYOUTS]

    def teardown(self) -> None:
        """End the store; what it leaves must be sound, but for what was damaged by us."""
        faults = self.subject.close()
        assert self.was_damaged or faults == []
        shutil.rmtree(self.path)

    @property
    def failing(self) -> bool:
        """Whether the disk fails now, so that nothing can be expected of it."""
        return False

    @property
    def losses(self) -> tuple[type[KVStoreError], ...]:
        """What a worker may meet when a block is found missing between its calls; it starts anew then."""
        return (NotReserved, ParentMissing) if self.failing or self.was_damaged else ()

    def hashes(self, which: int, word: str) -> list[bytes]:
        """The chain of a word."""
        if (which, word) not in self.known:
            ids = [ord(letter) * 1000 + n for letter in word for n in range(64 * PIECE)]
            self.known[which, word] = block_hashes(self.spaces[which], ids)
        return self.known[which, word]

    def shut_out(self, which: int) -> bool:
        """Whether slots of the other layout are held: this arena has one extent, so all others wait."""
        return any(filling and layout != which for layout, filling in self.held.values())

    def note_committed(self, which: int, blocks: list[bytes]) -> None:
        """These were filled and sealed just now."""
        self.committed[which] |= set(blocks)
        self.damaged -= set(blocks)

    @rule(which=layouts, word=words, unit=st.booleans())
    def store_word(self, which: int, word: str, unit: bool) -> None:
        """A worker stores a document, whole unless others hold the arena, or losses come to light."""
        if not self.shut_out(which):
            with contextlib.suppress(*self.losses):
                self.store_all(which, word, unit)

    def store_all(self, which: int, word: str, unit: bool) -> None:
        """Reserve, fill and commit piece by piece."""
        hashes = self.hashes(which, word)
        lease = self.store.reserve(self.spaces[which], ROOT, []).lease
        try:
            tickets = self.store_pieces(which, hashes, lease, unit)
            # A disk that fails answers only with its next attempt.
            for ticket, filled in tickets if self.store.status().mode == "ok" else ():
                if self.store.durable(ticket):
                    self.sure |= set(filled)
        finally:
            self.store.release(lease)

    def store_pieces(
        self, which: int, hashes: list[bytes], lease: int, unit: bool
    ) -> list[tuple[int, list[bytes]]]:
        """The tickets, and the blocks that each is for."""
        tickets: list[tuple[int, list[bytes]]] = []
        at = 0
        while at < len(hashes):
            parent = hashes[at - 1] if at else ROOT
            answer = self.store.reserve(self.spaces[which], parent, hashes[at : at + PIECE], lease=lease)
            moved = answer.blocks[: len(answer.blocks) - answer.retry]
            filled = [block.hash for block in moved if block.state is ReserveState.FILL]
            for block in moved:
                if block.data is not None:
                    block.data[:] = content(block.hash, LAYOUTS[which].block_bytes)
            if not moved:
                break  # the arena is full of what others hold
            at += len(moved)
            marks = [UnitMark(hashes[-1], UnitKind.REQUEST_END)] if unit and at == len(hashes) else []
            tickets.append((self.store.commit(lease, filled, marks), filled))
            self.note_committed(which, filled)
            self.marked[which] |= {mark.hash for mark in marks}
        return tickets

    @rule(target=leases, which=layouts, word=words)
    def reserve(self, which: int, word: str) -> int:
        """Another worker takes slots and does not come to an end."""
        hashes = self.hashes(which, word)
        match = self.store.match(self.spaces[which], hashes, 64 * len(hashes) + 1)
        at = min(match.stored_blocks, len(hashes) - 1)
        parent = hashes[at - 1] if at else ROOT
        try:
            answer = self.store.reserve(self.spaces[which], parent, hashes[at : at + 3])
        except self.losses:
            return 0
        filling = [block for block in answer.blocks if block.state is ReserveState.FILL]
        for block in filling:
            assert block.data is not None
            block.data[:] = content(block.hash, LAYOUTS[which].block_bytes)
        self.held[answer.lease] = (which, [block.hash for block in filling])
        return answer.lease

    @rule(lease=leases)
    def commit(self, lease: int) -> None:
        """It commits some of what it holds."""
        if lease in self.held:
            which, filling = self.held[lease]
            self.store.commit(lease, filling[:2])
            self.note_committed(which, filling[:2])
            self.held[lease] = (which, filling[2:])

    @rule(lease=leases)
    def release(self, lease: int) -> None:
        """It gives up what it holds."""
        if self.held.pop(lease, None):
            self.store.release(lease)

    @rule(which=layouts, word=words, extra=st.integers(0, 2))
    def hit(self, which: int, word: str, extra: int) -> None:
        """A prompt is matched, and what is promised is loaded."""
        if self.shut_out(which):
            return
        hashes, space = self.hashes(which, word), self.spaces[which]
        match = self.store.match(space, hashes, 64 * len(hashes) + extra)
        assert set(hashes[: match.stored_blocks]) <= self.committed[which]
        assert self.failing or match.stored_blocks >= self.leading(hashes, self.sure - self.damaged)
        if match.unit is not None:
            assert match.unit == hashes[match.unit_blocks - 1]
            assert match.unit in self.marked[which] or self.parts(which, match.unit)
        limit = (64 * len(hashes) + extra - 1) // 64
        assert match.blocks == min(match.unit_blocks, limit)
        assert match.host_blocks + match.disk_blocks == match.blocks
        usable = load_chain(self.store, space, hashes[: match.blocks])
        if not self.failing and self.store.status().mode == "ok":
            assert usable >= self.leading(hashes[: match.blocks], set(hashes) - self.damaged)

    @staticmethod
    def leading(hashes: list[bytes], among: set[bytes]) -> int:
        """How many of the first blocks are among these."""
        return next((at for at, block in enumerate(hashes) if block not in among), len(hashes))

    def parts(self, which: int, block: bytes) -> bool:
        """Whether chains part behind this block, so that it may bear a mark nobody made."""
        chains = [hashes for (of, _), hashes in self.known.items() if of == which]
        return any(block in hashes[PIECE - 1 :: PIECE] for hashes in chains)

    @rule(which=layouts, word=words)
    def meant_to_store(self, which: int, word: str) -> None:
        """A prompt is matched that will be stored, and then isn't."""
        hashes = self.hashes(which, word)
        self.store.match(self.spaces[which], hashes, 64 * len(hashes), store=True)

    @rule(which=layouts, word=words)
    def load_all_that_is_stored(self, which: int, word: str) -> None:
        """A Load of more than any match would promise."""
        if self.shut_out(which):
            return
        hashes = self.hashes(which, word)
        assert set(hashes[: load_chain(self.store, self.spaces[which], hashes)]) <= self.committed[which]

    @precondition(lambda self: not self.failing)
    @rule(which=layouts, word=words)
    def delete(self, which: int, word: str) -> None:
        """An operator deletes a document: its end goes unless something stands on it, and leases end."""
        hashes = self.hashes(which, word)
        try:
            self.subject.delete(hashes[-1])
        except UnitUnknown:
            return
        self.marked[which].discard(hashes[-1])
        for lease in [lease for lease, (of, _) in self.held.items() if of == which]:
            with pytest.raises(LeaseUnknown):
                self.store.commit(lease, [])
            self.store.release(lease)
            del self.held[lease]
        gone = 0
        while gone < len(hashes) and self.removable(which, hashes[-1 - gone], last=not gone):
            gone += 1
            self.committed[which].discard(hashes[-gone])
            self.sure.discard(hashes[-gone])
        match = self.store.match(self.spaces[which], hashes, 64 * len(hashes) + 1)
        assert match.stored_blocks <= len(hashes) - gone

    def removable(self, which: int, block: bytes, *, last: bool) -> bool:
        """Whether a block of a deleted unit, its last or one before, is needed by nothing else."""
        chains = [chain for (of, _), chain in self.known.items() if of == which]
        stands = any(
            parent == block and below in self.committed[which]
            for chain in chains
            for parent, below in pairwise(chain)
        )
        return not stands and (last or (block not in self.marked[which] and not self.parts(which, block)))

    @rule()
    def expire(self) -> None:
        """A long time goes by."""
        self.subject.expire()

    @rule(which=layouts, word=words, at=st.integers(0, 4 * PIECE))
    def damage(self, which: int, word: str, at: int) -> None:
        """A byte of a block rots on the disk, if it is there."""
        hashes = self.hashes(which, word)
        block = hashes[at % len(hashes)]
        if block in self.committed[which] and self.rot(block, LAYOUTS[which].block_bytes):
            self.damaged.add(block)
            self.was_damaged = True

    def rot(self, block: bytes, nbytes: int) -> bool:
        """Flip a byte in the middle of the payload; False if no file has it."""
        stored = content(block, nbytes)
        for file in (self.path / "data" / "payloads" / str(nbytes)).glob("*"):
            found = file.read_bytes().find(stored) if file.name != "lock.mdb" else -1
            if found >= 0:
                with open(file, "r+b") as damaged:
                    damaged.seek(found + nbytes // 2)
                    damaged.write(bytes([stored[nbytes // 2] ^ 0x10]))
                return True
        return False

    @precondition(lambda self: not self.failing and self.restarts < self.most_restarts)
    @rule()
    def restart(self) -> None:
        """The store ends cleanly and comes back."""
        self.restarts += 1
        self.subject.restart()
        self.held.clear()
        self.meet()
        counters = self.store.status().counters
        assert counters["lost_payloads"] == counters["catalog_skipped"] == 0

    @rule(which=layouts, word=words)
    def a_wrong_parent(self, which: int, word: str) -> None:
        """A block of another namespace is no parent."""
        try:
            self.store.reserve(self.spaces[1 - which], self.hashes(which, word)[-1], [])
        except ParentMissing:
            return
        raise AssertionError("a block of another namespace was taken for a parent")

    @invariant()
    def sound(self) -> None:
        """The tables agree with each other, and no tier holds more than it may."""
        assert self.subject.faults() == []
        status = self.store.status()
        assert status.disk.used_bytes <= status.disk.capacity_bytes
        assert status.host.used_bytes <= status.host.capacity_bytes
        if status.counters.get("disk_evicted_blocks") or status.counters.get("expired_blocks"):
            self.sure.clear()


class FaultyStoreMachine(StoreMachine):
    """The same over a disk that fails, lies and is slow. ``open`` must use ``faults``."""

    def __init__(self) -> None:
        self.faults = Faults()
        super().__init__()

    @property
    def failing(self) -> bool:
        """See ``StoreMachine``."""
        faults = self.faults
        return faults.fail_writes or faults.fail_reads or faults.lie_in_reads

    def teardown(self) -> None:
        """See ``StoreMachine``."""
        self.faults.fail_writes = self.faults.fail_reads = self.faults.lie_in_reads = False
        super().teardown()

    @rule(fail=st.booleans())
    def disk_writes(self, fail: bool) -> None:
        """Writes fail from now on, or no more."""
        self.faults.fail_writes = fail
        if fail:
            self.sure.clear()

    @rule(fail=st.booleans())
    def disk_reads(self, fail: bool) -> None:
        """Reads fail from now on, or no more."""
        self.faults.fail_reads = fail

    @rule(lie=st.booleans())
    def disk_lies(self, lie: bool) -> None:
        """Reads bring wrong bytes from now on, or no more; the store drops what it can't prove."""
        self.faults.lie_in_reads = lie
        if lie:
            self.sure.clear()
            self.was_damaged = True

    @rule(slow=st.booleans())
    def disk_is_slow(self, slow: bool) -> None:
        """Reads and writes take longer from now on, or no more."""
        self.faults.delay = 0.001 if slow else 0.0
