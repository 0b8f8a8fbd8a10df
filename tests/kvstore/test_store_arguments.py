"""Calls that are wrong: the right class, the value in the message, and nothing changed."""

import asyncio

import pytest

from kvstore.api import KVStore, MissReason, ReserveState
from kvstore.errors import (
    DeadlineExceeded,
    InvalidArgument,
    LeaseUnknown,
    NamespaceMismatch,
    NamespaceUnknown,
    NotReserved,
    ParentMissing,
    TicketUnknown,
    Unavailable,
)
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import LatentLayout
from kvstore.namespace import Namespace
from kvstore.settings import StoreSettings
from kvstore.testing.faults import Faults
from kvstore.units import UnitKind, UnitMark
from tests.kvstore.blocks import OTHER, SMALL, content, end_of, load_chain, open_store, store_chain, tokens

END = UnitKind.REQUEST_END
STRANGE = b"s" * 32


class World:
    """A store with a chain of four blocks, and four more that are reserved and filled."""

    def __init__(self, path):
        self.store = open_store(path)
        self.namespace = self.store.open_namespace(Namespace(layout=SMALL))
        self.hashes = block_hashes(self.namespace, tokens(1, 8))
        assert store_chain(self.store, self.namespace, self.hashes[:4])
        self.other = self.store.open_namespace(Namespace(layout=OTHER))
        answer = self.store.reserve(self.namespace, self.hashes[3], self.hashes[4:])
        self.lease = answer.lease
        for block in answer.blocks:
            block.data[:] = content(block.hash, SMALL.block_bytes)

    def state(self):
        status = self.store.status()
        matched = self.store.match(self.namespace, self.hashes, 1000)
        return (status.leases, status.host, status.disk, status.units, matched.blocks, matched.stored_blocks)


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    before = made.state()
    yield made
    assert made.state() == before
    assert made.store.check() == []
    # The lease is as good as it was.
    assert made.store.durable(made.store.commit(made.lease, made.hashes[4:], end_of(made.hashes)))
    assert load_chain(made.store, made.namespace, made.hashes) == 8
    made.store.close()


def test_the_embedded_store_has_the_verbs(world):
    assert isinstance(world.store, KVStore)


def test_a_block_that_was_never_reserved_cannot_be_committed(world):
    for hashes in ([STRANGE], [*world.hashes[4:], STRANGE], world.hashes[:1]):
        with pytest.raises(NotReserved, match=hashes[-1][:6].hex()):
            world.store.commit(world.lease, hashes, end_of(world.hashes))


def test_a_block_cannot_be_committed_twice(tmp_path):
    world = World(tmp_path)
    with pytest.raises(NotReserved, match="twice"):
        world.store.commit(world.lease, [world.hashes[4]] * 2)
    assert world.store.durable(world.store.commit(world.lease, world.hashes[4:6]))
    before = world.state()
    with pytest.raises(NotReserved, match="committed already"):
        world.store.commit(world.lease, world.hashes[4:])
    assert world.state() == before
    world.store.commit(world.lease, world.hashes[6:])
    world.store.close()


@pytest.mark.parametrize("hashes", [[], [4, 5]])
@pytest.mark.parametrize("unit", [STRANGE, 6])
def test_a_unit_cannot_end_at_a_block_that_is_not_stored(world, unit, hashes):
    block = unit if isinstance(unit, bytes) else world.hashes[unit]
    with pytest.raises(NotReserved, match="not stored"):
        world.store.commit(world.lease, [world.hashes[at] for at in hashes], [UnitMark(block, END)])


@pytest.mark.parametrize("kinds", [0, 8, 15, -1])
def test_unit_kinds_must_be_kinds(world, kinds):
    with pytest.raises(InvalidArgument, match="kinds"):
        world.store.commit(world.lease, [], [UnitMark(world.hashes[3], kinds)])


def test_an_unknown_lease_is_refused_and_releasing_it_is_ignored(world):
    strange = world.lease + 1
    for use in (
        lambda: world.store.commit(strange, world.hashes[4:]),
        lambda: world.store.reserve(world.namespace, ROOT, world.hashes, lease=strange),
    ):
        with pytest.raises(LeaseUnknown, match=str(strange)):
            use()
    world.store.release(strange)


def test_a_lease_from_before_a_restart_is_not_taken_for_a_new_one(tmp_path):
    leases = set()
    for _ in range(2):
        with open_store(tmp_path) as store:
            namespace = store.open_namespace(Namespace(layout=SMALL))
            leases |= {store.reserve(namespace, ROOT, []).lease for _ in range(3)}
    assert len(leases) == 6


def test_a_lease_cannot_be_used_for_another_namespace(world):
    with pytest.raises(NamespaceMismatch, match=str(world.lease)):
        world.store.reserve(world.other, ROOT, [STRANGE], lease=world.lease)


def test_an_unknown_parent_is_refused(world):
    for parent in (STRANGE, world.hashes[0][:-1] + b"?"):
        with pytest.raises(ParentMissing, match=parent[:6].hex()):
            world.store.reserve(world.namespace, parent, [STRANGE])


def test_a_parent_of_another_namespace_is_unknown(world):
    with pytest.raises(ParentMissing):
        world.store.reserve(world.other, world.hashes[3], [STRANGE])


def test_a_block_of_another_namespace_cannot_be_reserved(world):
    """Else a worker that has learned of a hash could fill another tenant's block."""
    for block in (world.hashes[0], world.hashes[5]):
        with pytest.raises(NamespaceMismatch, match=block[:6].hex()):
            world.store.reserve(world.other, ROOT, [block])


def test_a_chain_cannot_be_tied_into_a_knot(world):
    for parent, hashes in (
        (world.hashes[3], [world.hashes[0]]),
        (ROOT, [world.hashes[1]]),
        (world.hashes[0], [world.hashes[2]]),
        (ROOT, [STRANGE, world.hashes[1]]),
    ):
        with pytest.raises(InvalidArgument, match="consecutive"):
            world.store.reserve(world.namespace, parent, hashes)


def test_a_block_named_twice_is_refused(world):
    with pytest.raises(InvalidArgument, match="twice"):
        world.store.reserve(world.namespace, ROOT, [STRANGE, STRANGE])


@pytest.mark.parametrize("bad", [b"", b"x" * 31, b"x" * 33, "x" * 32, bytearray(32)], ids=repr)
def test_hashes_of_the_wrong_length_or_type_are_refused(world, bad):
    store, namespace = world.store, world.namespace
    for use in (
        lambda: store.match(namespace, [bad], 64),
        lambda: store.load(namespace, [bad]),
        lambda: store.reserve(namespace, bad, [STRANGE]),
        lambda: store.reserve(namespace, ROOT, [bad]),
        lambda: store.commit(world.lease, [bad]),
        lambda: store.commit(world.lease, [], [UnitMark(bad, END)]),
    ):
        with pytest.raises(InvalidArgument, match="32 bytes"):
            use()


@pytest.mark.parametrize("digest", [b"", b"n" * 32])
def test_an_unknown_namespace_is_refused(world, digest):
    for use in (
        lambda: world.store.match(digest, [], 1),
        lambda: world.store.load(digest, []),
        lambda: world.store.reserve(digest, ROOT, []),
    ):
        with pytest.raises(NamespaceUnknown, match="open_namespace"):
            use()


def test_fewer_tokens_than_blocks_are_refused(world):
    with pytest.raises(InvalidArgument, match="tokens=100 "):
        world.store.match(world.namespace, world.hashes, 100)


@pytest.mark.parametrize("align", [0, -64, 63, 96])
def test_an_alignment_that_is_no_multiple_of_a_block_is_refused(world, align):
    with pytest.raises(InvalidArgument, match=f"align={align} "):
        world.store.match(world.namespace, world.hashes, 512, align=align)


@pytest.mark.parametrize("first", [-1, 9])
def test_a_load_from_outside_its_hashes_is_refused(world, first):
    with pytest.raises(InvalidArgument, match=f"first={first} "):
        world.store.load(world.namespace, world.hashes, first=first)


def test_a_ticket_that_was_never_given_is_unknown(world):
    with pytest.raises(TicketUnknown, match="77"):
        world.store.durable(77)


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


def test_a_closed_store_is_a_miss_and_refuses_the_rest(tmp_path):
    world = World(tmp_path)
    store, namespace, hashes = world.store, world.namespace, world.hashes
    store.close()
    store.close()
    assert store.match(namespace, hashes, 512).reason is MissReason.UNAVAILABLE
    with store.load(namespace, hashes, first=2) as load:
        assert list(load) == []
        assert load.short == 2
    for use in (
        lambda: store.reserve(namespace, ROOT, hashes),
        lambda: store.commit(world.lease, hashes[4:]),
        lambda: store.durable(1),
        lambda: store.status(),
        lambda: store.open_namespace(Namespace(layout=SMALL)),
    ):
        with pytest.raises(Unavailable, match="closed"):
            use()


def test_a_store_that_is_closed_under_a_load_ends_it(tmp_path):
    world = World(tmp_path)
    with world.store.load(world.namespace, world.hashes[:4]) as load:
        steps = iter(load)
        assert len(next(steps)) == 4
        world.store.close()
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


def test_a_loaded_block_cannot_be_written_to(world):
    with world.store.load(world.namespace, world.hashes[:1]) as load:
        for batch in load:
            for block in batch:
                assert block.data.readonly
                assert block.data.nbytes == SMALL.block_bytes


def test_an_embedded_store_can_be_opened_inside_a_running_loop(tmp_path):
    async def serve():
        with open_store(tmp_path) as store:
            return store.status().mode

    assert asyncio.run(serve()) == "ok"
