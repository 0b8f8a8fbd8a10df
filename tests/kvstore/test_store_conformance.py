"""The embedded store under the shipped suite, over both kinds of payloads, running and restarted."""

from pathlib import Path

from kvstore.testing.store_conformance import ChainConformance, ClosedStoreConformance, StoreConformance
from kvstore.testing.subjects import EmbeddedSubject


class TestLmdb(StoreConformance):
    def open(self, path: Path) -> EmbeddedSubject:
        return EmbeddedSubject(path, "lmdb")


class TestSlab(StoreConformance):
    def open(self, path: Path) -> EmbeddedSubject:
        return EmbeddedSubject(path, "slab")


class TestLmdbRestarted(ChainConformance):
    restarts = True

    def open(self, path: Path) -> EmbeddedSubject:
        return EmbeddedSubject(path, "lmdb")


class TestSlabRestarted(ChainConformance):
    restarts = True

    def open(self, path: Path) -> EmbeddedSubject:
        return EmbeddedSubject(path, "slab")


class TestClosed(ClosedStoreConformance):
    def open(self, path: Path) -> EmbeddedSubject:
        return EmbeddedSubject(path)
