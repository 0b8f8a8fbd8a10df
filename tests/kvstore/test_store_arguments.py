"""Settings, closing, and waiting: what the suite for every store does not ask of an embedded one."""

import asyncio

import pytest

from kvstore.api import KVStore, ReserveState
from kvstore.errors import DeadlineExceeded, FormatMismatch, InvalidArgument, NamespaceLimit
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import LatentLayout
from kvstore.namespace import Namespace
from kvstore.settings import StoreSettings
from kvstore.testing.faults import Faults
from tests.kvstore.blocks import SMALL, content, load_chain, open_store, store_chain, tokens


def test_the_embedded_store_has_the_verbs(tmp_path):
    with open_store(tmp_path) as store:
        assert isinstance(store, KVStore)


def test_a_lease_from_before_a_restart_is_not_taken_for_a_new_one(tmp_path):
    leases = set()
    for _ in range(2):
        with open_store(tmp_path) as store:
            namespace = store.open_namespace(Namespace(layout=SMALL))
            leases |= {store.reserve(namespace, ROOT, []).lease for _ in range(3)}
    assert len(leases) == 6


def test_an_interval_that_does_not_fit_the_blocks_is_refused(tmp_path):
    with open_store(tmp_path, interval=64) as store, pytest.raises(InvalidArgument, match="interval=64 "):
        store.open_namespace(Namespace(layout=LatentLayout(num_layers=1, block_tokens=128)))


def test_blocks_of_other_lengths_work_with_the_default_alignment(tmp_path):
    layout = LatentLayout(num_layers=2, latent_rank=32, rope_dim=16, block_tokens=128)
    with open_store(tmp_path, interval=256) as store:
        namespace = store.open_namespace(Namespace(layout=layout))
        hashes = block_hashes(namespace, tokens(1, 8), block_tokens=128)
        assert store_chain(store, namespace, hashes, nbytes=layout.block_bytes)
        match = store.match(namespace, hashes, 512)
        assert match.blocks == 3
        assert [point.tokens for point in match.persist_points] == [256, 512]


@pytest.mark.parametrize(
    "changes",
    [
        {"host_bytes": 1},
        {"disk_bytes": 1},
        {"ghost_bytes": -1},
        {"readers": 0},
        {"interval": 65},
        {"policy": "lru"},
        {"codec": "gzip"},
        {"lease_seconds": 0},
        {"drain_seconds": -1.0},
        {"lease_seconds": float("nan")},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_are_refused_by_name(tmp_path, changes):
    with pytest.raises(InvalidArgument, match=next(iter(changes))):
        StoreSettings(data=tmp_path, **changes)


def test_a_store_that_is_closed_under_a_load_ends_it(tmp_path):
    store = open_store(tmp_path)
    namespace = store.open_namespace(Namespace(layout=SMALL))
    hashes = block_hashes(namespace, tokens(1, 4))
    assert store_chain(store, namespace, hashes)
    with store.load(namespace, hashes) as load:
        steps = iter(load)
        assert len(next(steps)) == 4
        store.close()
        assert list(steps) == []
        assert load.short == 4


def test_waiting_longer_than_allowed_is_an_error_for_durable_and_a_miss_for_a_load(tmp_path):
    faults = Faults()
    with open_store(tmp_path, faults) as store:
        namespace = store.open_namespace(Namespace(layout=SMALL))
        hashes = block_hashes(namespace, tokens(1, 4))
        store_chain(store, namespace, hashes)
    with open_store(tmp_path, faults) as store:
        faults.read_gate.clear()
        faults.write_gate.clear()
        with store.load(namespace, hashes, timeout=0.01) as load:
            assert list(load) == []
            assert load.short == 0
        fresh = block_hashes(namespace, tokens(2, 1))
        answer = store.reserve(namespace, ROOT, fresh)
        assert answer.blocks[0].state is ReserveState.FILL
        answer.blocks[0].data[:] = content(fresh[0], SMALL.block_bytes)
        ticket = store.commit(answer.lease, fresh)
        with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
            store.durable(ticket, timeout=0.01)
        faults.read_gate.set()
        faults.write_gate.set()
        assert store.durable(ticket)
        assert load_chain(store, namespace, hashes) == 4
        assert store.check() == []


def test_an_embedded_store_can_be_opened_inside_a_running_loop(tmp_path):
    async def serve():
        with open_store(tmp_path) as store:
            return store.status().mode

    assert asyncio.run(serve()) == "ok"


def test_a_directory_of_other_payloads_is_refused_with_the_remedy_and_left_as_it_is(tmp_path):
    with open_store(tmp_path) as store:
        namespace = store.open_namespace(Namespace(layout=SMALL))
        hashes = block_hashes(namespace, tokens(1, 4))
        assert store_chain(store, namespace, hashes)
    with pytest.raises(FormatMismatch, match="holds lmdb payloads, not slab; start with payloads=lmdb"):
        open_store(tmp_path, payloads="slab")
    with open_store(tmp_path) as store:
        assert load_chain(store, namespace, hashes) == 4


def test_sizes_of_blocks_are_bounded_and_those_that_are_open_go_on(tmp_path):
    layouts = [LatentLayout(num_layers=1, latent_rank=n, rope_dim=0) for n in range(1, 6)]
    with open_store(tmp_path, payloads="slab", tenant_block_sizes=4) as store:
        opened = []
        for layout in layouts[:-1]:
            opened.append(store.open_namespace(Namespace(layout=layout)))
            hashes = block_hashes(opened[-1], tokens(1, 1))
            assert store_chain(store, opened[-1], hashes, nbytes=layout.block_bytes)
        with pytest.raises(NamespaceLimit, match="tenant 'default' has 4 sizes of blocks in use"):
            store.open_namespace(Namespace(layout=layouts[-1]))
        again = store.open_namespace(Namespace(layout=layouts[0], model="another"))
        assert again not in opened
        hashes = block_hashes(again, tokens(1, 4))
        assert store_chain(store, again, hashes, nbytes=layouts[0].block_bytes)
        assert load_chain(store, again, hashes) == 4
