"""Daemons under the shipped state machine: through the mapped arena and as bytes over TCP."""

from pathlib import Path

from hypothesis import settings

from kvstore.testing.store_machine import MACHINE_DISK_BYTES, StoreMachine
from tests.server.subjects import DaemonSubject


class MappedMachine(StoreMachine):
    most_restarts = 2

    def open(self, path: Path) -> DaemonSubject:
        return DaemonSubject(path, "mapped", "lmdb", disk_bytes=MACHINE_DISK_BYTES)


class TcpMachine(StoreMachine):
    most_restarts = 2

    def open(self, path: Path) -> DaemonSubject:
        return DaemonSubject(path, "tcp-bytes", "slab", disk_bytes=MACHINE_DISK_BYTES)


TestMapped = MappedMachine.TestCase
TestTcp = TcpMachine.TestCase
TestMapped.settings = TestTcp.settings = settings(max_examples=3, stateful_step_count=40, deadline=None)
