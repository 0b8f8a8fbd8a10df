"""What every store must do, as tests: subclass ``StoreConformance`` in a test module.

    class TestMine(StoreConformance):
        def open(self, path):
            return EmbeddedSubject(path)

One store serves all tests of a class, each in a namespace of its own. Needs pytest.
"""

from __future__ import annotations

import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from kvstore.api import KVStore, MissReason, ReserveState
from kvstore.errors import (
    Forked,
    LeaseUnknown,
    NamespaceMismatch,
    NotReserved,
    ParentMissing,
    StillWritten,
    TicketUnknown,
    Unavailable,
)
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import DType, LatentLayout, Strip
from kvstore.namespace import Namespace
from kvstore.testing.chains import (
    OTHER,
    SMALL,
    Conversation,
    content,
    end_of,
    eventually,
    hit,
    load_chain,
    store_chain,
    tokens,
)
from kvstore.testing.subjects import HOST_BYTES, Subject
from kvstore.testing.wrong_calls import STRANGE, WRONG_CALLS, World
from kvstore.units import plan_output

A, B, C, D = (tokens(seed, 100) for seed in range(4))

Arrive = Callable[..., Conversation]

# What keeps a block in sight though its view has ended.
LOOKS: dict[str, Callable[[memoryview], Any]] = {
    "array": lambda view: np.frombuffer(view, np.uint8),
    "part": lambda view: view[16:64],
    "cast": lambda view: view.cast("B"),
}

DIFFERENT = Namespace(layout=replace(SMALL, strips=(Strip("index", 2),)), model="m", revision="r")
VARIANTS: dict[str, Namespace] = {
    "model": replace(DIFFERENT, model="n"),
    "revision": replace(DIFFERENT, revision="s"),
    "tenant": replace(DIFFERENT, tenant="other"),
    "rope": replace(DIFFERENT, rope="{}"),
    "rope layout": replace(DIFFERENT, rope_layout="interleaved"),
    "adapter": replace(DIFFERENT, adapter="lora"),
    "salt": replace(DIFFERENT, salt="salt"),
    "numerics": replace(DIFFERENT, numerics="exact"),
    "dtype": replace(DIFFERENT, layout=replace(DIFFERENT.layout, dtype=DType.FP16)),
    "layer range": replace(DIFFERENT, layout=replace(DIFFERENT.layout, first_layer=2)),
    "layers": replace(DIFFERENT, layout=replace(DIFFERENT.layout, num_layers=1)),
    "strips": replace(DIFFERENT, layout=SMALL),
}


class ChainConformance:
    """What is stored comes back, to its own namespace. With ``restarts`` the store is ended and brought
    back between any two steps.
    """

    restarts = False

    def open(self, path: Path) -> Subject:
        """The store under test, empty, with its data in this directory."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def opened(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
        """The class's store, opened once."""
        subject = cls().open(tmp_path_factory.mktemp("store"))
        yield subject
        assert subject.close() == []

    @pytest.fixture
    def subject(self, opened: Subject) -> Iterator[Subject]:
        """The class's store; sound after each test, and no test leaves anything held."""
        leases = opened.store.status().leases
        yield opened
        assert opened.faults() == []
        assert opened.store.status().leases <= leases

    @pytest.fixture
    def arrive(self, subject: Subject, request: pytest.FixtureRequest) -> Arrive:
        """Makes the worker of the next request, in this test's own namespace."""

        def make(layout: LatentLayout = SMALL) -> Conversation:
            if self.restarts:
                subject.restart()
            return Conversation(subject.store, layout, salt=request.node.name)

        return make

    # --- units

    def test_a_second_turn_hits_the_end_of_the_first_answer(self, arrive: Arrive) -> None:
        prompt, answer = A[:1000], B[:300]
        first = arrive()
        first.request(prompt)
        whole = prompt + answer
        hashes = block_hashes(first.namespace, whole)
        (point,) = plan_output(len(prompt), len(whole), interval=0)
        assert point.tokens == 1280 == (len(whole) - 1) // 64 * 64
        assert store_chain(first.store, first.namespace, hashes[: point.tokens // 64])
        assert arrive().request(whole + C[:200]) == 1280

    def test_the_third_request_hits_what_the_first_two_have_in_common(self, arrive: Arrive) -> None:
        assert arrive().request(A[:1000] + B[:500]) == 0
        assert arrive().request(A[:1000] + C[:500]) == 0
        assert arrive().request(A[:1000] + D[:500]) == 960

    @pytest.mark.parametrize("length", [640, 641, 700])
    def test_the_same_prompt_again_uses_all_but_a_token(self, arrive: Arrive, length: int) -> None:
        """Of a multiple of 64 all but the last block."""
        assert arrive().request(A[:length]) == 0
        assert arrive().request(A[:length]) == (length - 1) // 64 * 64

    def test_a_match_without_the_intent_to_store_changes_nothing(self, arrive: Arrive) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, A[:1000] + B[:500])
        worker.store.match(worker.namespace, hashes, 1500)
        assert worker.match(A[:1000] + C[:500]).persist_points[0].tokens == 1472
        worker.request(A[:1000] + B[:500])
        worker.match(A[:1000] + C[:500])
        assert arrive().match(A[:1000] + D[:500]).blocks == 0

    def test_content_shorter_than_a_block_is_never_cached(self, arrive: Arrive) -> None:
        assert arrive().request(A[:63]) == 0
        match = arrive().match(A[:63])
        assert (match.blocks, match.reason, match.persist_points) == (0, MissReason.SHORTER_THAN_BLOCK, ())

    # --- blocks

    def test_a_document_larger_than_the_arena_passes_through_it(self, arrive: Arrive) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, tokens(9, 200))
        assert SMALL.block_bytes * 200 > 2 * HOST_BYTES
        assert store_chain(worker.store, worker.namespace, hashes)
        worker = arrive()
        assert worker.store.match(worker.namespace, hashes, 64 * 200 + 1).blocks == 200
        assert load_chain(worker.store, worker.namespace, hashes) == 200
        assert worker.store.status().host.used_bytes <= HOST_BYTES

    def test_a_load_from_the_middle_brings_the_rest(self, arrive: Arrive) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, A[:2000])
        store_chain(worker.store, worker.namespace, hashes)
        worker = arrive()
        assert load_chain(worker.store, worker.namespace, hashes, first=20) == 31
        assert load_chain(worker.store, worker.namespace, hashes, first=31) == 31

    def test_a_load_of_more_than_is_stored_ends_short(self, arrive: Arrive) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, A[:1280])
        store_chain(worker.store, worker.namespace, hashes[:10])
        worker = arrive()
        assert load_chain(worker.store, worker.namespace, hashes) == 10
        assert load_chain(worker.store, worker.namespace, hashes, first=15) == 10

    def test_layouts_live_side_by_side(self, arrive: Arrive) -> None:
        arrive().request(A[:1000])
        arrive(OTHER).request(A[:1000])
        worker = arrive()
        assert hit(worker.store, worker.namespace, A[:1000]) == 960
        worker = arrive(OTHER)
        assert hit(worker.store, worker.namespace, A[:1001]) == 960

    def test_leaving_a_load_early_leaves_nothing_held(self, arrive: Arrive) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, A[: 64 * 60])
        store_chain(worker.store, worker.namespace, hashes)
        before = worker.store.status().leases
        for _ in range(3):
            with worker.store.load(worker.namespace, hashes) as load:
                for _ in load:
                    break
        assert load_chain(worker.store, worker.namespace, hashes) == 60
        assert worker.store.status().leases == before

    def test_loaded_blocks_are_read_only(self, arrive: Arrive) -> None:
        worker = arrive()
        worker.request(A[:640])
        hashes = block_hashes(worker.namespace, A[:640])
        with worker.store.load(worker.namespace, hashes) as load:
            loaded = [(block.data.readonly, block.data.nbytes) for batch in load for block in batch]
        assert loaded == [(True, SMALL.block_bytes)] * 10

    def test_reserve_says_what_is_there_what_comes_and_what_is_to_be_filled(self, arrive: Arrive) -> None:
        worker = arrive()
        store, hashes = worker.store, block_hashes(worker.namespace, A[:256])
        assert store_chain(store, worker.namespace, hashes[:2])
        first = store.reserve(worker.namespace, ROOT, hashes[:3])
        second = store.reserve(worker.namespace, ROOT, hashes)
        present, pending, fill = ReserveState.PRESENT, ReserveState.PENDING, ReserveState.FILL
        assert [block.state for block in first.blocks] == [present, present, fill]
        assert [block.state for block in second.blocks] == [present, present, pending, fill]
        store.release(first.lease)
        with pytest.raises(LeaseUnknown):
            store.commit(first.lease, hashes[2:3])
        again = store.reserve(worker.namespace, ROOT, hashes, lease=second.lease)
        assert [block.state for block in again.blocks] == [present, present, fill, fill]
        store.release(second.lease)

    def test_storing_in_pieces_under_one_lease_makes_one_chain(self, arrive: Arrive) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, A[:640])
        assert store_chain(worker.store, worker.namespace, hashes[:3])
        worker.store.release(worker.store.reserve(worker.namespace, hashes[2], hashes[3:6]).lease)
        assert store_chain(worker.store, worker.namespace, hashes)
        assert load_chain(worker.store, worker.namespace, hashes) == 10

    def test_threads_may_share_a_store(self, arrive: Arrive) -> None:
        worker = arrive()
        loaded: list[int] = []

        def work(seed: int) -> None:
            hashes = block_hashes(worker.namespace, tokens(800 + seed, 8))
            store_chain(worker.store, worker.namespace, hashes)
            loaded.append(load_chain(worker.store, worker.namespace, hashes))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert loaded == [8] * 6


class StoreConformance(ChainConformance):
    """All tests of one kind of store."""

    @pytest.fixture
    def world(self, subject: Subject, request: pytest.FixtureRequest) -> Iterator[World]:
        """A lease at work, which is as good as it was in the end."""
        world = World.make(subject.store, request.node.name)
        before = world.state()
        yield world
        assert world.state() == before
        assert world.store.durable(world.store.commit(world.lease, world.hashes[4:], end_of(world.hashes)))
        assert load_chain(world.store, world.namespace, world.hashes) == 8
        world.store.release(world.lease)

    # --- nobody else's

    @pytest.mark.parametrize("field", VARIANTS)
    def test_what_differs_in_one_field_shares_nothing(self, subject: Subject, field: str) -> None:
        store, theirs = subject.store, subject.store.open_namespace(VARIANTS[field])
        ours = store.open_namespace(DIFFERENT)
        hashes = block_hashes(ours, A[:640])
        assert store_chain(store, ours, hashes, nbytes=DIFFERENT.layout.block_bytes)
        assert not set(hashes) & set(block_hashes(theirs, A[:640]))
        # Neither by the same tokens nor, for somebody who has learned of them, by our hashes.
        for chain in (block_hashes(theirs, A[:640]), hashes):
            match = store.match(theirs, chain, 641)
            assert (match.blocks, match.stored_blocks, match.unit) == (0, 0, None)
            assert load_chain(store, theirs, chain) == 0
        with pytest.raises(NamespaceMismatch):
            store.reserve(theirs, ROOT, hashes)
        with pytest.raises(ParentMissing):
            store.reserve(theirs, hashes[-1], [STRANGE])

    def test_what_token_ids_do_not_say_keeps_chains_apart_from_there_on(self, arrive: Arrive) -> None:
        worker = arrive()
        one, two = (block_hashes(worker.namespace, A[:640], extra={4: image}) for image in (b"1", b"2"))
        assert store_chain(worker.store, worker.namespace, one)
        assert worker.store.match(worker.namespace, two, 641).stored_blocks == 4

    # --- views

    def test_a_loaded_view_is_dead_after_its_step(self, arrive: Arrive) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, A[: 64 * 30])
        store_chain(worker.store, worker.namespace, hashes)
        views = []
        with worker.store.load(worker.namespace, hashes) as load:
            for batch in load:
                for view in views:
                    with pytest.raises(ValueError, match="released"):
                        view[0]
                views += [block.data for block in batch]
        for view in views:
            with pytest.raises(ValueError, match="released"):
                bytes(view)

    @pytest.mark.parametrize("look", LOOKS)
    def test_what_still_looks_at_a_loaded_block_sees_no_other(self, arrive: Arrive, look: str) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, A[: 64 * 8])
        store_chain(worker.store, worker.namespace, hashes)
        with worker.store.load(worker.namespace, hashes) as load:
            kept = [LOOKS[look](block.data) for batch in load for block in batch]
        # As much again as the arena has, several times: whatever is free is used.
        for seed in range(3):
            other = block_hashes(worker.namespace, tokens(700 + seed, 80))
            assert store_chain(worker.store, worker.namespace, other)
        for block, seen in zip(hashes, kept, strict=True):
            assert bytes(seen) in content(block, SMALL.block_bytes)
        leases = worker.store.status().leases
        del kept, seen
        eventually(lambda: worker.store.status().leases < leases or leases == 0)
        assert load_chain(worker.store, worker.namespace, hashes) == 8

    def test_a_view_to_fill_is_dead_after_the_commit(self, arrive: Arrive) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, A[:256])
        answer = worker.store.reserve(worker.namespace, ROOT, hashes)
        views = [block.data for block in answer.blocks]
        for block, view in zip(hashes, views, strict=True):
            assert view is not None
            view[:] = content(block, SMALL.block_bytes)
        worker.store.commit(answer.lease, hashes[:3], end_of(hashes[:3]))
        for view in views[:3]:
            with pytest.raises(ValueError, match="released"):
                view[:] = bytes(SMALL.block_bytes)  # type: ignore[index]
        assert views[3] is not None
        assert len(views[3]) == SMALL.block_bytes
        worker.store.release(answer.lease)
        with pytest.raises(ValueError, match="released"):
            views[3][:] = bytes(SMALL.block_bytes)
        assert load_chain(worker.store, worker.namespace, hashes) == 3

    @pytest.mark.parametrize("look", LOOKS)
    def test_what_can_still_be_written_is_not_stored(self, arrive: Arrive, look: str) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, A[:128])
        answer = worker.store.reserve(worker.namespace, ROOT, hashes)
        for block in answer.blocks:
            assert block.data is not None
            block.data[:] = content(block.hash, SMALL.block_bytes)
        data = answer.blocks[0].data
        assert data is not None
        kept = LOOKS[look](data)
        with pytest.raises(StillWritten, match="drop"):
            worker.store.commit(answer.lease, hashes)
        assert worker.store.match(worker.namespace, hashes, 129).stored_blocks == 0
        kept[0] = 0 if kept[0] else 1
        del kept
        again = worker.store.reserve(worker.namespace, ROOT, hashes, lease=answer.lease)
        assert [block.state for block in again.blocks] == [ReserveState.FILL] * 2
        for block in again.blocks:
            assert block.data is not None
            block.data[:] = content(block.hash, SMALL.block_bytes)
        del data
        worker.store.commit(answer.lease, hashes)
        worker.store.release(answer.lease)
        assert load_chain(worker.store, worker.namespace, hashes) == 2

    @pytest.mark.parametrize("look", LOOKS)
    def test_what_still_writes_after_a_release_writes_into_no_other_block(
        self, arrive: Arrive, look: str
    ) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, A[: 64 * 4])
        answer = worker.store.reserve(worker.namespace, ROOT, hashes)
        kept = [LOOKS[look](block.data) for block in answer.blocks if block.data is not None]
        worker.store.release(answer.lease)
        other = block_hashes(worker.namespace, tokens(750, 80))
        assert store_chain(worker.store, worker.namespace, other)
        for one in kept:
            one[0] ^= 255
        assert load_chain(worker.store, worker.namespace, other) == 80
        leases = worker.store.status().leases
        del kept, one
        eventually(lambda: worker.store.status().leases < leases or leases == 0)

    # --- what is dropped

    def test_loads_that_are_dropped_leave_no_thread_and_no_slot(self, arrive: Arrive) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, A[: 64 * 60])
        store_chain(worker.store, worker.namespace, hashes)
        assert load_chain(worker.store, worker.namespace, hashes) == 60  # what lives as long as the client
        leases, threads = worker.store.status().leases, threading.active_count()
        for batches in (0, 1):
            for _ in range(5):
                steps = iter(worker.store.load(worker.namespace, hashes))
                for _ in range(batches):
                    assert next(steps)
                del steps
        eventually(lambda: worker.store.status().leases == leases)
        eventually(lambda: threading.active_count() <= threads)
        assert load_chain(worker.store, worker.namespace, hashes) == 60

    # --- wrong calls

    @pytest.mark.parametrize("name", WRONG_CALLS)
    def test_a_wrong_call_is_refused_by_its_class_and_changes_nothing(self, world: World, name: str) -> None:
        expected, call = WRONG_CALLS[name]
        with pytest.raises(expected) as raised:
            call(world)
        assert type(raised.value) is expected
        assert len(str(raised.value)) > 20

    def test_an_unknown_lease_is_released_without_harm(self, world: World) -> None:
        world.store.release(world.lease + 1)

    def test_a_block_is_committed_once(self, arrive: Arrive) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, A[:128])
        answer = worker.store.reserve(worker.namespace, ROOT, hashes)
        for block in answer.blocks:
            assert block.data is not None
            block.data[:] = content(block.hash, SMALL.block_bytes)
        worker.store.commit(answer.lease, hashes[:1])
        with pytest.raises(NotReserved):
            worker.store.commit(answer.lease, hashes)
        worker.store.commit(answer.lease, hashes[1:])
        assert load_chain(worker.store, worker.namespace, hashes) == 2
        worker.store.release(answer.lease)

    def test_leases_and_tickets_end_with_the_run_that_gave_them(
        self, arrive: Arrive, subject: Subject
    ) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, A[:128])
        lease = worker.store.reserve(worker.namespace, ROOT, hashes).lease
        ticket = worker.store.commit(lease, [])
        subject.restart()
        store = subject.store
        with pytest.raises((LeaseUnknown, NotReserved)):
            store.commit(lease, hashes)
        with pytest.raises(TicketUnknown):
            store.durable(ticket)
        store.release(lease)
        again = arrive()
        assert again.namespace == worker.namespace
        assert load_chain(store, again.namespace, hashes) == 0
        assert store.status().leases == 0


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
        hashes = block_hashes(namespace, A[:640])
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
