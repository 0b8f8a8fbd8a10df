"""DeepSeek's documented cache rules, and what else a worker may count on; each also after a restart."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.embedded import Embedded
from kvstore.errors import NamespaceUnknown
from kvstore.hashing import block_hashes
from kvstore.namespace import Namespace
from kvstore.observer import Departure
from kvstore.units import UnitKind
from tests.kvstore.blocks import (
    SMALL,
    Conversation,
    load_chain,
    open_store,
    store_chain,
    tokens,
)

pytestmark = pytest.mark.usefixtures("payload_kind")

A, B, C, D = (tokens(seed, 100) for seed in range(4))


class Rig:
    """A store that may be restarted between any two steps."""

    def __init__(self, path: Path, restart: bool, **changes) -> None:
        self.path, self.restart, self.changes = path, restart, changes
        self.store = open_store(path, **changes)

    def next(self) -> Conversation:
        """A worker for the next request; behind a restart if that is asked for."""
        if self.restart:
            self.again()
        return Conversation(self.store)

    def again(self) -> Embedded:
        assert self.store.check() == []
        self.store.close()
        self.store = open_store(self.path, **self.changes)
        return self.store


@pytest.fixture(params=[False, True], ids=["running", "restarted"])
def rig(request, tmp_path) -> Iterator:
    made = []

    def make(**changes) -> Rig:
        made.append(Rig(tmp_path, request.param, **changes))
        return made[-1]

    yield make
    for one in made:
        assert one.store.check() == []
        one.store.close()


def test_with_intervals_the_second_request_hits_the_last_mark_and_the_third_the_common_prefix(rig):
    it = rig(interval=2048)
    a = A[:5000]
    assert it.next().request(a + B[:1000]) == 0
    assert it.next().request(a + C[:1000]) == 4096
    assert it.next().request(a + D[:1000]) == 4992


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_an_input_that_diverges_after_k_intervals_hits_the_kth(rig, k):
    it = rig(interval=512)
    it.next().request(A[:2000])
    assert it.next().request(A[: 512 * k + 100] + B[:800]) == 512 * k


def test_a_common_prefix_of_chains_that_were_only_seen_becomes_a_unit(rig):
    it = rig()
    worker = it.next()
    namespace = worker.namespace
    seen = block_hashes(namespace, A[:1000] + B[:500])
    it.store.match(namespace, seen, 1500, store=True)  # meant to be stored, but never was
    prompt = A[:1000] + C[:500]
    match = it.store.match(namespace, block_hashes(namespace, prompt), 1500)
    assert [p.tokens for p in match.persist_points if p.kinds & UnitKind.COMMON_PREFIX] == [960]
    assert worker.request(prompt) == 0
    assert it.next().request(A[:1000] + D[:500]) == 960


def test_a_stored_chain_and_one_that_was_only_seen_behind_it_have_a_common_prefix(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        store_chain(store, worker.namespace, block_hashes(worker.namespace, A[:640]), [])  # no unit
        store.match(worker.namespace, block_hashes(worker.namespace, A[:640] + B[:500]), 1140, store=True)
        points = worker.match(A[:640] + C[:500]).persist_points
        assert [point.tokens for point in points if point.kinds & UnitKind.COMMON_PREFIX] == [640]


def test_policy_block_hits_at_any_stored_block(rig):
    it = rig(policy="block")
    it.next().request(A[:1000])
    assert it.next().request(A[:500] + B[:500]) == 448


@pytest.mark.parametrize("compressible", [True, False], ids=["compressible", "noise"])
def test_zstd_gives_back_the_same_bytes_and_saves_room(rig, compressible):
    it = rig(codec="zstd")
    worker = it.next()
    hashes = block_hashes(worker.namespace, tokens(9, 100))
    assert store_chain(it.store, worker.namespace, hashes, compressible=compressible)
    worker = it.next()
    assert load_chain(worker.store, worker.namespace, hashes, compressible=compressible) == 100
    used = it.store.status().disk.used_bytes
    assert (used < 100 * SMALL.block_bytes) == compressible


def test_a_store_reads_what_was_written_with_another_codec(tmp_path):
    for codec in ("zstd", "raw", "zstd"):
        with open_store(tmp_path, codec=codec) as store:
            worker = Conversation(store)
            for seed, kind in ((1, "zstd"), (2, "raw")):
                hashes = block_hashes(worker.namespace, tokens(seed, 10))
                if codec == kind:
                    store_chain(store, worker.namespace, hashes, compressible=True)
                if store.match(worker.namespace, hashes, 640).stored_blocks:
                    assert load_chain(store, worker.namespace, hashes, compressible=True) == 10


def test_a_digest_stays_good_over_a_restart(tmp_path):
    with open_store(tmp_path) as store:
        namespace = store.open_namespace(Namespace(layout=SMALL))
        hashes = block_hashes(namespace, A[:640])
        store_chain(store, namespace, hashes[:5])
    with open_store(tmp_path) as store:
        assert load_chain(store, namespace, hashes[:5]) == 5
        assert store_chain(store, namespace, hashes)  # without open_namespace
        assert store.open_namespace(Namespace(layout=SMALL)) == namespace
    with open_store(tmp_path / "other") as store, pytest.raises(NamespaceUnknown):
        store.match(namespace, hashes, 640)


def test_a_layout_of_the_same_size_keeps_its_blocks_apart(tmp_path):
    twin = SMALL.__class__(num_layers=1, latent_rank=64, rope_dim=28)
    assert twin.block_bytes == SMALL.block_bytes
    with open_store(tmp_path) as store:
        one, two = Conversation(store), Conversation(store, twin)
        one.request(A[:640])
        assert two.request(A[:640]) == 0
        assert two.request(A[:640]) == 576


def test_a_unit_whose_middle_was_evicted_is_invisible(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        hashes = block_hashes(worker.namespace, A[:640])
        store_chain(store, worker.namespace, hashes)
        index = store._store._index
        middle = index.find(hashes[4])
        store._call(lambda: store._store._writer.free(middle, Departure.CAPACITY))
        assert worker.match(A[:641]).stored_blocks == 4
        assert worker.match(A[:641]).blocks == 0
        assert store.check() == []
        assert store_chain(store, worker.namespace, hashes)
        assert worker.match(A[:641]).blocks == 10
    with open_store(tmp_path) as store:
        assert Conversation(store).match(A[:641]).blocks == 10


def test_ancestors_are_as_young_as_what_stands_on_them_after_a_restart(tmp_path):
    """Else the beginning of a long conversation would be the first to go."""
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        store_chain(store, worker.namespace, block_hashes(worker.namespace, A[:640]))
        store_chain(store, worker.namespace, block_hashes(worker.namespace, B[:640]))
        store_chain(store, worker.namespace, block_hashes(worker.namespace, A[:1280]))
    with open_store(tmp_path) as store:
        index = store._store._index
        for block in index:
            if (parent := index.parent[block]) >= 0:
                assert index.used[parent] >= index.used[block]
        old, young = (index.find(block_hashes(worker.namespace, t[:640])[-1]) for t in (B, A))
        assert index.used[old] < index.used[young]
