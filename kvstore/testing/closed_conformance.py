"""What every store must do when it ends, or its process forks: each test ends the store."""

from __future__ import annotations

import os
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from kvstore.api import KVStore, MissReason
from kvstore.errors import Forked, LeaseUnknown, Unavailable
from kvstore.hashing import ROOT, block_hashes
from kvstore.namespace import Namespace
from kvstore.testing.chains import SMALL, end_of, eventually, load_chain, store_chain, tokens
from kvstore.testing.subjects import Subject
from kvstore.testing.wrong_calls import STRANGE, World


class ClosedStoreConformance:
    """What a store must do once it is closed; apart, for it ends the store. ``open`` as above."""

    def open(self, path: Path) -> Subject:
        """The store under test."""
        raise NotImplementedError

    def test_a_closed_store_is_a_miss_and_refuses_the_rest(self, tmp_path: Path) -> None:
        subject = self.open(tmp_path)
        store, world = subject.store, World.make(subject.store, "closed")
        store.close()
        store.close()
        assert store.match(world.namespace, world.hashes, 512).reason is MissReason.UNAVAILABLE
        with store.load(world.namespace, world.hashes, first=2) as load:
            assert list(load) == []
            assert load.short == 2
        refused: tuple[Callable[[], object], ...] = (
            lambda: world.reserve(ROOT, world.hashes),
            lambda: store.durable(1),
            lambda: store.status(),
            lambda: store.open_namespace(Namespace(layout=SMALL)),
        )
        for use in refused:
            with pytest.raises(Unavailable, match="closed"):
                use()
        with pytest.raises((Unavailable, LeaseUnknown)):
            world.commit(world.hashes[4:])
        store.release(world.lease)
        subject.close()

    def test_what_is_left_ends_with_the_store(self, tmp_path: Path) -> None:
        subject = self.open(tmp_path)
        store, threads = subject.store, threading.active_count()
        world = World.make(store, "left")
        answer = store.reserve(world.namespace, ROOT, [STRANGE])
        loads = [store.load(world.namespace, world.hashes[:4]) for _ in range(3)]
        steps = [iter(load) for load in loads]
        firsts = [next(step) for step in steps[:2]]
        loaded = [block.data for first in firsts for block in first]
        store.close()
        for view in (answer.blocks[0].data, *loaded):
            assert view is not None
            with pytest.raises(ValueError, match="released"):
                view[0]
        assert [list(step) for step in steps] == [[], [], []]
        assert [load.short for load in loads] == [*map(len, firsts), 0]
        eventually(lambda: threading.active_count() <= threads)
        subject.restart()
        assert subject.store.status().leases == 0
        subject.close()

    def test_a_store_that_is_dropped_ends(self, tmp_path: Path) -> None:
        subject = self.open(tmp_path)
        closed = subject.store
        closed.close()
        before = threading.active_count()
        subject.restart()
        namespace = subject.store.open_namespace(Namespace(layout=SMALL))
        hashes = block_hashes(namespace, tokens(0, 10))
        assert store_chain(subject.store, namespace, hashes)
        steps = iter(subject.store.load(namespace, hashes))
        assert next(steps)
        dropped = weakref.ref(subject.store)
        del steps
        subject.store = closed
        eventually(lambda: dropped() is None and threading.active_count() <= before)
        subject.restart()
        assert subject.store.status().leases == 0
        subject.close()

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_a_forked_child_is_told_so_at_once_and_takes_nothing_along(self, tmp_path: Path) -> None:
        subject = self.open(tmp_path)
        store, world = subject.store, World.make(subject.store, "forked")
        load = store.load(world.namespace, world.hashes[:4])
        steps = iter(load)
        assert next(steps)
        child = os.fork()
        if not child:
            _child(lambda: _in_child(store, world, list(steps)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        # The parent goes on, as if there had been no child.
        load.__exit__(None, None, None)
        store.commit(world.lease, world.hashes[4:], end_of(world.hashes))
        store.release(world.lease)
        assert load_chain(store, world.namespace, world.hashes) == 8
        subject.close()

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_a_child_that_lives_keeps_nothing_of_its_parents(self, tmp_path: Path) -> None:
        subject = self.open(tmp_path)
        world = World.make(subject.store, "outlived")
        end, lives = os.pipe()
        child = os.fork()
        if not child:
            os.close(lives)
            _child(lambda: os.read(end, 1) == b"")
        try:
            subject.store.release(world.lease)
            subject.restart()  # the directory is its parent's alone
            assert subject.store.open_namespace(Namespace(layout=SMALL, salt="outlived")) == world.namespace
            assert load_chain(subject.store, world.namespace, world.hashes[:4]) == 4
            assert subject.store.status().leases == 0
        finally:
            os.close(lives)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(end)
        subject.close()


def _child(works: Callable[[], bool]) -> NoReturn:
    """End a forked child: 0 if what it does works."""
    code = 1
    try:
        code = 0 if works() else 2
    finally:
        traceback.print_exc() if code == 1 else None
        os._exit(code)


def _in_child(store: KVStore, world: World, rest: list[object]) -> bool:
    """Every verb, and the ends of what the parent holds."""
    refused: tuple[Callable[[], object], ...] = (
        lambda: world.reserve(ROOT, world.hashes),
        lambda: world.commit(world.hashes[4:]),
        lambda: store.release(world.lease),
        lambda: store.durable(1),
        lambda: store.status(),
        lambda: store.open_namespace(Namespace(layout=SMALL)),
    )
    for use in refused:
        with pytest.raises(Forked, match="fork"):
            use()
    missed = store.match(world.namespace, world.hashes, 512)
    with store.load(world.namespace, world.hashes, first=2) as load:
        came = list(load)
    store.close()
    return (missed.reason, came, load.short, rest) == (MissReason.UNAVAILABLE, [], 2, [])
