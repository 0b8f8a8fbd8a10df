"""What every store must do, as tests: subclass ``StoreConformance`` in a test module.

    class TestMine(StoreConformance):
        def open(self, path):
            return EmbeddedSubject(path)

One store serves all tests of a class, each in a namespace of its own. Needs pytest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.api import MissReason, ReserveState
from kvstore.errors import (
    LeaseUnknown,
    NamespaceMismatch,
    NotReserved,
    ParentMissing,
    TicketUnknown,
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
    hit,
    load_chain,
    store_chain,
    tokens,
)
from kvstore.testing.closed_conformance import ClosedStoreConformance as ClosedStoreConformance
from kvstore.testing.subjects import HOST_BYTES, Subject
from kvstore.testing.view_conformance import Arrive, ViewConformance
from kvstore.testing.wrong_calls import STRANGE, WRONG_CALLS, World
from kvstore.units import plan_output

A, B, C, D = (tokens(seed, 100) for seed in range(4))

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


class StoreConformance(ChainConformance, ViewConformance):
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
