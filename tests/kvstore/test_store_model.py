"""The embedded store under the shipped state machine, over both kinds of payloads."""

from pathlib import Path

from hypothesis import settings

from kvstore.payloads.kinds import OPEN
from kvstore.settings import PayloadKind
from kvstore.testing.store_machine import MACHINE_DISK_BYTES, FaultyStoreMachine
from kvstore.testing.subjects import EmbeddedSubject


class LmdbMachine(FaultyStoreMachine):
    kind: PayloadKind = "lmdb"

    def open(self, path: Path) -> EmbeddedSubject:
        self.faults.inner = OPEN[self.kind]
        return EmbeddedSubject(path, self.kind, self.faults.open, disk_bytes=MACHINE_DISK_BYTES)


class SlabMachine(LmdbMachine):
    kind = "slab"


TestLmdb = LmdbMachine.TestCase
TestSlab = SlabMachine.TestCase
TestLmdb.settings = TestSlab.settings = settings(max_examples=8, stateful_step_count=30, deadline=None)
