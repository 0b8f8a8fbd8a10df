"""Daemons under the shipped suite, whichever way blocks travel and lie."""

from pathlib import Path

from kvstore.testing.store_conformance import ChainConformance, ClosedStoreConformance, StoreConformance
from tests.server.subjects import DaemonSubject


class TestMappedOverLmdb(StoreConformance):
    def open(self, path: Path) -> DaemonSubject:
        return DaemonSubject(path, "mapped", "lmdb")


class TestMappedOverSlab(ChainConformance):
    def open(self, path: Path) -> DaemonSubject:
        return DaemonSubject(path, "mapped", "slab")


class TestUnixBytes(StoreConformance):
    def open(self, path: Path) -> DaemonSubject:
        return DaemonSubject(path, "unix-bytes", "slab")


class TestTcpOverLmdb(ChainConformance):
    def open(self, path: Path) -> DaemonSubject:
        return DaemonSubject(path, "tcp-bytes", "lmdb")


class TestTcpOverSlab(StoreConformance):
    def open(self, path: Path) -> DaemonSubject:
        return DaemonSubject(path, "tcp-bytes", "slab")


class TestClosedMapped(ClosedStoreConformance):
    def open(self, path: Path) -> DaemonSubject:
        return DaemonSubject(path, "mapped", "lmdb")


class TestClosedTcp(ClosedStoreConformance):
    def open(self, path: Path) -> DaemonSubject:
        return DaemonSubject(path, "tcp-bytes", "lmdb")
