"""What an operator deletes leaves HOST and DISK, moves the epoch, and does not come back."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from kvstore.api import MissReason, ReserveState
from kvstore.checking import check
from kvstore.errors import DiskError, EpochPassed, LeaseUnknown, NamespaceUnknown, UnitUnknown
from kvstore.expiry import STEP_BLOCKS
from kvstore.hashing import ROOT
from kvstore.namespace import Namespace
from kvstore.settings import MIB
from kvstore.units import UnitKind
from tests.kvstore.blocks import (
    SMALL,
    Conversation,
    end_of,
    fill,
    in_loop,
    load_chain,
    open_store,
    tokens,
    until,
)
from tests.kvstore.test_expiry import chain
from tests.kvstore.test_writeback import Bench

A, B, C = (tokens(seed, 12) for seed in range(3))


def delete(store, block: bytes):
    return store.curate(lambda it: it.delete_unit(block.hex()))


def empty(store) -> bool:
    status = store.status()
    return not (status.disk.blocks or status.disk.used_bytes or status.host.used_bytes or status.units)


# --- units


def test_a_deleted_unit_leaves_both_tiers_and_says_so(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        hashes = chain(worker, A)
        assert worker.match(A).epoch == 0
        assert delete(store, hashes[-1]).blocks == 12
        match = worker.match(A)
        assert (match.stored_blocks, match.reason, match.epoch) == (0, MissReason.DELETED, 1)
        assert empty(store)
        assert store.status().counters["deleted_blocks"] == 12
        assert store.check() == []
    with open_store(tmp_path) as store:
        assert empty(store)
        worker = Conversation(store)
        assert worker.match(A).epoch == 1
        assert chain(worker, A) == hashes  # new content is welcome
        assert load_chain(store, worker.namespace, hashes) == 12


def test_blocks_that_another_unit_needs_stay(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        one, other = chain(worker, A[:512] + B, units=[4]), chain(worker, A[:512] + C)
        assert delete(store, one[-1]).blocks == 12
        assert load_chain(store, worker.namespace, other) == 20
        assert delete(store, one[3]).blocks == 0  # the mark alone: a longer chain stands on its blocks
        assert worker.match(A[:512] + B).unit_blocks == 8
        assert delete(store, other[-1]).blocks == 12
        assert delete(store, other[7]).blocks == 8
        assert empty(store)
    with open_store(tmp_path) as store:
        assert empty(store)
        assert check_closed(store, tmp_path) == []


def check_closed(store, path) -> list:
    store.close()
    return check(path).faults


def test_a_mark_that_was_deleted_alone_does_not_come_back_with_a_restart(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        hashes = chain(worker, A, units=[6])
        load_chain(store, worker.namespace, hashes[:6])  # its record is due
        assert delete(store, hashes[5]).blocks == 0
    with open_store(tmp_path) as store:
        assert Conversation(store).match(A[:400]).blocks == 0
        assert store.status().units == 1


@pytest.mark.parametrize("name", ["", "0" * 16, "zz", "0" * 64, "z" * 64])
def test_a_name_of_no_unit_is_refused(tmp_path, name):
    with open_store(tmp_path) as store:
        chain(Conversation(store), A)
        with pytest.raises(UnitUnknown, match="units have names that begin with"):
            store.curate(lambda it: it.delete_unit(name))


def test_a_beginning_names_a_unit_if_no_other_begins_so(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        one, two = chain(worker, A), chain(worker, B)
        found = store.curate(lambda it: it.unit(one[-1].hex()[:16]))
        assert (found.hash, found.tokens, found.kinds) == (one[-1], 768, UnitKind.REQUEST_END)
        assert store.curate(lambda it: it.unit(two[-1].hex())).hash == two[-1]
        assert {unit.hash for unit in store.curate(lambda it: it.units(order="tokens"))} == {one[-1], two[-1]}
        assert store.curate(lambda it: it.units(tenant="nobody")) == []


# --- namespaces and tenants


def test_a_tenant_is_deleted_with_all_its_namespaces_and_nobody_elses(tmp_path):
    with open_store(tmp_path) as store:
        spaces = {
            (tenant, salt): store.open_namespace(Namespace(layout=SMALL, tenant=tenant, salt=salt))
            for tenant in ("acme", "other")
            for salt in ("", "x")
        }
        worker, stored = Conversation(store), {}
        for name, worker.namespace in spaces.items():
            stored[name] = chain(worker, A)
        deleted = store.curate(lambda it: it.delete_namespaces(tenant="acme"))
        assert (deleted.namespaces, deleted.blocks) == (2, 24)
        for name, namespace in spaces.items():
            gone = name[0] == "acme"
            assert load_chain(store, namespace, stored[name]) == (0 if gone else 12)
            assert store.match(namespace, stored[name], 769).epoch == int(gone)
        one = spaces["other", "x"]
        assert store.curate(lambda it: it.delete_namespaces(digest=one.hex()[:20])).blocks == 12
        assert load_chain(store, spaces["other", ""], stored["other", ""]) == 12
        assert store.check() == []
    with open_store(tmp_path) as store:
        assert store.status().disk.blocks == 12
        assert check_closed(store, tmp_path) == []


@pytest.mark.parametrize("wrong", [{"tenant": "nobody"}, {"digest": "zz"}, {"digest": ""}, {}])
def test_a_namespace_that_is_none_is_refused(tmp_path, wrong):
    with open_store(tmp_path) as store:
        chain(Conversation(store), A)
        with pytest.raises(NamespaceUnknown):
            store.curate(lambda it: it.delete_namespaces(**wrong))
        assert store.status().disk.blocks == 12


# --- what is at work at the time


class Rig(Bench):
    """A store of one namespace, whose chains come and are deleted."""

    async def delete(self, hashes=None):
        curator = self.store.keeping.curator
        if hashes is None:
            return await curator.delete_namespaces(digest=self.namespace.hex())
        return await curator.delete_unit(hashes[-1].hex())

    def blocks(self):
        status = self.store.status()
        return status.disk.blocks, status.host.blocks

    def match(self, hashes):
        return self.store.match(self.namespace, hashes, 64 * len(hashes) + 1, align=64, store=False)


@pytest.fixture(params=["unit", "namespace"])
def whole(request):
    return request.param == "namespace"


@in_loop
async def test_blocks_that_are_being_written_are_deleted(tmp_path, whole):
    async with Rig(tmp_path) as it:
        it.faults.written_gate.clear()
        hashes = it.hashes(1, 40)  # one batch at the gate, the rest behind it
        ticket = await it.put(hashes)
        await until(lambda: it.faults.written_gate.arrived == 1)
        deletion = asyncio.ensure_future(it.delete(None if whole else hashes))
        await until(lambda: it.match(hashes).epoch == 1)
        it.faults.written_gate.set()
        assert (await deletion).blocks == 40
        assert it.blocks() == (0, 0)
        await it.store.durable(ticket)
        assert it.blocks() == (0, 0)
    async with Rig(tmp_path) as it:
        assert it.blocks() == (0, 0)


@in_loop
async def test_blocks_that_wait_to_be_written_are_deleted_and_are_not_durable(tmp_path, whole):
    async with Rig(tmp_path) as it:
        it.faults.fail_writes = True
        hashes = it.hashes(1, 8)
        ticket = await it.put(hashes)
        assert not await it.store.durable(ticket)
        ticket = it.store.commit(it.worker, (await it.reserve(hashes)).lease, [], end_of(hashes))
        assert (await it.delete(None if whole else hashes)).blocks == 8
        assert not await it.store.durable(ticket)
        assert it.blocks() == (0, 0)
        it.faults.fail_writes = False
        other = it.hashes(2, 4)
        assert await it.store.durable(await it.put(other))
        assert it.blocks() == (4, 4)


@in_loop
async def test_blocks_that_are_reserved_are_not_committed(tmp_path, whole):
    async with Rig(tmp_path) as it:
        hashes = it.hashes(1, 8)
        await it.store.durable(await it.put(hashes[:4]))
        lease = await fill(it.store, it.other, it.namespace, hashes[4:], hashes[3])
        await it.delete(None if whole else hashes[:4])
        with pytest.raises(LeaseUnknown):
            it.store.commit(it.other, lease, hashes[4:], end_of(hashes))
        assert it.blocks() == (0, 4)  # slots that a worker maps stay until it gives them back
        it.store.release(it.other, lease)
        assert it.blocks() == (0, 0)


@in_loop
async def test_what_was_made_before_is_refused_afterwards(tmp_path, whole):
    async with Rig(tmp_path) as it:
        hashes = it.hashes(1, 8)
        epoch = it.match(hashes).epoch
        await it.store.durable(await it.put(hashes[:4]))
        await it.delete(None if whole else hashes[:4])
        with pytest.raises(EpochPassed, match="match again"):
            it.store.reserve(it.worker, it.namespace, ROOT, hashes, 0, epoch)
        it.store.reserve(it.worker, it.namespace, ROOT, hashes, 0, it.match(hashes).epoch)
        it.store.disconnect(it.worker)


@in_loop
async def test_a_load_ends_short_and_its_slots_are_not_given_to_others_before_it_returns_them(
    tmp_path, whole
):
    async with Rig(tmp_path) as it:
        hashes = it.hashes(1, 40)
        assert await it.store.durable(await it.put(hashes))
        stream = it.store.load(it.other, it.namespace, hashes, 0)
        batch = await stream.next()
        kept = bytes(stream.view(0))
        await it.delete(None if whole else hashes)
        await it.put(it.hashes(2, 20))
        assert stream.view(0) == kept
        while await stream.next():
            pass
        assert stream.short == len(batch)
        stream.close(returned=True)
        assert it.blocks()[1] == 20


@in_loop
async def test_a_block_that_is_being_read_is_given_to_nobody(tmp_path, whole):
    async with Rig(tmp_path) as it:
        hashes = it.hashes(1, 20)
        await it.store.durable(await it.put(hashes))
    async with Rig(tmp_path) as it:
        it.faults.read_gate.clear()
        stream = it.store.load(it.other, it.namespace, hashes, 0)
        coming = asyncio.ensure_future(stream.next())
        await until(lambda: it.faults.reads > 0)
        await it.delete(None if whole else hashes)
        assert await coming == []
        assert stream.short == 0
        again = await it.put(hashes)  # the same blocks anew, while the old reads go on
        it.faults.read_gate.set()
        assert await it.store.durable(again)
        assert await it.load(hashes) == 20
        stream.close(returned=True)
        await until(lambda: not it.store._host.reading())
        assert it.blocks() == (20, 20)
        assert it.store.status().counters.get("checksum_failures", 0) == 0


@in_loop
async def test_while_a_namespace_is_erased_it_is_a_miss_and_takes_nothing(tmp_path):
    async with Rig(tmp_path, host_bytes=16 * MIB, disk_bytes=32 * MIB) as it:
        hashes = it.hashes(1, 2 * STEP_BLOCKS)
        assert await it.store.durable(await it.put(hashes))
        it.faults.free_gate.clear()
        deletion = asyncio.ensure_future(it.delete())
        await until(lambda: it.faults.free_gate.arrived == 1)
        assert it.blocks()[0] == STEP_BLOCKS
        assert it.match(hashes).stored_blocks == 0
        assert it.store.load(it.other, it.namespace, hashes, 0).short == 0
        answer = it.store.reserve(it.worker, it.namespace, ROOT, hashes[:4], 0)
        assert answer.states == [ReserveState.RETRY] * 4
        assert it.store.reserve(it.worker, it.namespace, ROOT, hashes[:4], answer.lease).lease == answer.lease
        it.faults.free_gate.set()
        assert (await deletion).blocks == 2 * STEP_BLOCKS
        assert await it.store.durable(await it.put(hashes[:4]))
        it.store.disconnect(it.worker)
        it.store.disconnect(it.other)


# --- when it fails, or the store dies meanwhile


@in_loop
async def test_a_deletion_that_cannot_be_written_down_changes_nothing(tmp_path, whole):
    async with Rig(tmp_path) as it:
        it.store._disk.catalog = it.faults.guard(it.store._disk.catalog)
        hashes = it.hashes(1, 8)
        await it.store.durable(await it.put(hashes))
        it.faults.fail_commits = 1
        with pytest.raises(DiskError):
            await it.delete(None if whole else hashes)
        assert it.match(hashes).epoch == 0
        assert await it.load(hashes) == 8


@in_loop
async def test_a_caller_who_goes_away_does_not_stop_it(tmp_path, whole):
    async with Rig(tmp_path) as it:
        hashes = it.hashes(1, 8)
        await it.store.durable(await it.put(hashes))
        it.faults.free_gate.clear()
        deletion = asyncio.ensure_future(it.delete(None if whole else hashes))
        await until(lambda: it.faults.free_gate.arrived == 1)
        deletion.cancel()
        it.faults.free_gate.set()
        await until(lambda: not it.store.keeping.curator.busy)
        assert it.blocks() == (0, 0)
        assert await it.store.durable(await it.put(hashes))


@in_loop
async def test_a_store_that_dies_in_the_middle_of_it_has_nothing_of_it_when_it_comes_back(tmp_path):
    async with Rig(tmp_path / "live", host_bytes=16 * MIB, disk_bytes=32 * MIB) as it:
        other = await it.store.open_namespace(Namespace(layout=SMALL, salt="other"))
        hashes = it.hashes(1, 2 * STEP_BLOCKS)
        assert await it.store.durable(await it.put(hashes))
        ours, it.namespace = it.namespace, other
        kept = it.hashes(3, 4)
        assert await it.store.durable(await it.put(kept))
        it.namespace = ours
        it.faults.free_gate.clear()
        deletion = asyncio.ensure_future(it.delete())
        await until(lambda: it.faults.free_gate.arrived == 1)
        # What SIGKILL would leave now. (The files have holes.)
        subprocess.run(["cp", "-a", "--sparse=always", tmp_path / "live", tmp_path / "dead"], check=True)
        it.faults.free_gate.set()
        await deletion
    async with Rig(tmp_path / "dead", disk_bytes=32 * MIB) as it:
        assert it.blocks() == (4, 0)
        assert it.match(hashes).epoch == 1
        assert await it.load(hashes) == 0
        it.namespace = other
        assert await it.load(kept) == 4
        it.namespace = ours
        assert await it.store.durable(await it.put(hashes[:30]))
    assert check(tmp_path / "dead").faults == []
    async with Rig(tmp_path / "dead", disk_bytes=32 * MIB) as it:
        assert it.blocks() == (34, 0)


@in_loop
async def test_a_damaged_epoch_is_taken_for_another_one(tmp_path):
    async with Rig(tmp_path) as it:
        hashes = it.hashes(1, 4)
        await it.store.durable(await it.put(hashes))
        await it.delete(hashes)
        space = it.store.space(it.namespace)
        key = b"epoch/" + space.id.to_bytes(4, "little")
        with it.store._disk.catalog._env.begin(write=True) as txn:
            txn.put(key, b"rubbish", db=it.store._disk.catalog._notes)
    async with Rig(tmp_path) as it:
        assert it.match(hashes).epoch > 1
        assert it.store.status().counters["catalog_skipped"] == 1
