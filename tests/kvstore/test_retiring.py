"""Namespaces come and go: what holds nothing is retired, what comes back is another; each has its share."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.allowance import Allowances
from kvstore.catalog import Catalog
from kvstore.checking import check
from kvstore.errors import (
    CapacityTooSmall,
    DiskError,
    EpochPassed,
    InvalidArgument,
    NamespaceLimit,
    NamespaceUnknown,
    TicketUnknown,
)
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import LatentLayout
from kvstore.namespace import Namespace
from kvstore.registry import MAX_DESCRIPTION
from kvstore.settings import MIB
from kvstore.store import Store
from tests.kvstore.blocks import (
    DAY,
    SMALL,
    Conversation,
    faulty,
    fill,
    in_loop,
    load_chain,
    open_store,
    put,
    settings,
    store_chain,
    tokens,
)
from tests.kvstore.test_expiry import chain
from tests.kvstore.test_races import asked, catalogue_busy
from tests.kvstore.test_writeback import Bench

A = tokens(1, 4)


def step(number: int, tenant: str = "default") -> Namespace:
    """What a trainer opens at each of its steps."""
    return Namespace(layout=SMALL, salt=f"step {number}", tenant=tenant)


def sized(size: int, tenant: str = "default", salt: str = "") -> Namespace:
    """A namespace whose blocks have another size for each number."""
    return Namespace(LatentLayout(num_layers=1, latent_rank=size, rope_dim=0), tenant=tenant, salt=salt)


def retire(store, idle_seconds: float = 0.0) -> int:
    return store._run(store._store.keeping.registry.retire_idle(idle_seconds))


def catalogued(path) -> int:
    with closing(Catalog.open(path / "catalog", MIB)) as catalog:
        return len(catalog.namespaces())


# --- what holds nothing goes


@pytest.mark.parametrize("gone", ["never stored", "deleted", "expired"])
def test_a_namespace_that_holds_nothing_is_retired_and_comes_back_under_its_digest(tmp_path, gone):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        if gone != "never stored":
            hashes = chain(worker, A)
            assert retire(store) == 0
        if gone == "deleted":
            store.curate(lambda it: it.delete_namespaces(digest=worker.namespace.hex()))
        if gone == "expired":
            store.expire(store._store.time.now() + 2 * DAY)
        assert retire(store, idle_seconds=3600.0) == 0  # it was used a moment ago
        assert retire(store) == 1
        assert (store.status().namespaces, store.status().counters["retired_namespaces"]) == (0, 1)
        with pytest.raises(NamespaceUnknown, match="call open_namespace first"):
            store._call(lambda: store._store.match(worker.namespace, [], 1, align=64, store=False))
        again = Conversation(store)
        assert again.namespace == worker.namespace
        hashes = chain(again, A)
        assert load_chain(store, again.namespace, hashes) == 4
        assert store.check() == []
    with open_store(tmp_path) as store:
        assert load_chain(store, Conversation(store).namespace, hashes) == 4
    assert check(tmp_path).faults == []


def test_whoever_comes_back_to_a_retired_namespace_notices_nothing(tmp_path):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        for use in (
            lambda: worker.match(A).blocks == 0,
            lambda: load_chain(store, worker.namespace, block_hashes(worker.namespace, A)) == 0,
            lambda: len(chain(worker, A)) == 4,
        ):
            assert retire(store) == 1
            assert use()


@in_loop
async def test_what_holds_something_or_is_in_use_stays(tmp_path):
    async with Bench(tmp_path) as it:
        store, retire_idle = it.store, it.store.keeping.registry.retire_idle
        lease = store.reserve(it.worker, it.namespace, ROOT, [], 0).lease
        assert await retire_idle(0) == 0  # a lease
        store.release(it.worker, lease)
        hashes = it.hashes(1, 2)
        lease = await fill(store, it.worker, it.namespace, hashes)
        assert await retire_idle(0) == 0  # blocks being filled
        it.faults.write_gate.clear()
        ticket = store.commit(it.worker, lease, hashes, [])
        store.release(it.worker, lease)
        retiring = await asked(retire_idle(0))
        it.faults.write_gate.set()
        assert await store.durable(ticket)
        assert await retiring == 0  # blocks on their way
        stream = store.load(it.worker, it.namespace, hashes, 0)
        await store.keeping.curator.delete_namespaces(digest=it.namespace.hex())
        assert await retire_idle(0) == 0  # a load that may still touch its slots
        stream.close(returned=True)
        assert await retire_idle(0) == 1
        with pytest.raises(TicketUnknown):
            store.tenant_of_ticket(ticket)


@in_loop
async def test_what_left_a_namespace_is_off_the_disk_before_its_record_goes(tmp_path):
    """Else a kill would leave records that name nothing."""
    async with Bench(tmp_path) as it:
        hashes = it.hashes(1, 4)
        assert await it.store.durable(await it.put(hashes))
        it.faults.free_gate.clear()
        expiring = asyncio.ensure_future(it.store.keeping.expire(it.store.time.now() + 2 * DAY))
        await asyncio.to_thread(it.faults.free_gate.await_arrivals, 1, 30)
        retiring = await asked(it.store.keeping.registry.retire_idle(0))
        assert it.store.status().namespaces == 1
        it.faults.free_gate.set()
        assert (await expiring, await retiring) == (4, 1)


@in_loop
async def test_one_that_is_used_while_it_is_about_to_be_retired_stays(tmp_path):
    async with Bench(tmp_path) as it:
        other = await it.store.open_namespace(step(1))
        await put(it.store, it.worker, other, block_hashes(other, A))
        it.faults.write_gate.clear()
        it.store._writer.hurry()
        await asyncio.to_thread(it.faults.write_gate.await_arrivals, 1, 30)
        retiring = await asked(it.store.keeping.registry.retire_idle(0))  # waits for the batch
        it.match([])
        it.faults.write_gate.set()
        assert await retiring == 0
        assert it.store.status().namespaces == 2


@in_loop
async def test_one_that_is_opened_while_its_record_goes_is_a_new_one(tmp_path):
    async with Bench(tmp_path) as it:
        before = it.store.space(it.namespace)
        async with catalogue_busy(it):
            retiring = await asked(it.store.keeping.registry.retire_idle(0))
            with pytest.raises(NamespaceUnknown):
                it.store.space(it.namespace)
            opening = [await asked(it.store.open_namespace(before.namespace)) for _ in range(3)]
        assert await retiring == 1
        assert {await each for each in opening} == {it.namespace}
        after = it.store.space(it.namespace)
        assert after.id > before.id
        assert await it.store.durable(await it.put(it.hashes(1, 2)))
        await it.store.close()
        it.store = await Store.open(settings(it.path, **it.changes), it.faults.open)
        assert it.store.space(it.namespace).id == after.id
        assert it.match(it.hashes(1, 2)).stored_blocks == 2


@in_loop
async def test_one_whose_record_cannot_go_stays_open(tmp_path, monkeypatch):
    async with Bench(tmp_path) as it:

        def fail(*_):
            raise DiskError("injected")

        with monkeypatch.context() as patched:
            patched.setattr(it.store._disk, "drop_namespaces", fail)
            with pytest.raises(DiskError):
                await it.store.keeping.registry.retire_idle(0)
        assert await it.store.durable(await it.put(it.hashes(1, 2)))
        assert it.hit(it.hashes(1, 2)) == 2


# --- no row, lease, ticket or epoch of one is another's


def test_a_worker_that_remembers_a_retired_namespace_is_told_that_it_is_another(tmp_path):
    """What was deleted may still be in the worker's pool: the epoch it knows must not come back."""
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        chain(worker, A)
        known = {worker.match(A).epoch}
        store.curate(lambda it: it.delete_namespaces(digest=worker.namespace.hex()))
        known.add(worker.match(A).epoch)
        assert retire(store) == 1
        worker = Conversation(store)
        epoch = worker.match(A).epoch
        assert epoch not in known
        with pytest.raises(EpochPassed):
            store.reserve(worker.namespace, ROOT, block_hashes(worker.namespace, A), epoch=0)
        known.add(epoch)
    with open_store(tmp_path) as store:
        assert Conversation(store).match(A).epoch == epoch
        assert retire(store) == 1
    with open_store(tmp_path) as store:
        assert Conversation(store).match(A).epoch not in known


def test_ids_are_never_given_twice(tmp_path):
    seen = Counter()
    for _ in range(3):
        with open_store(tmp_path) as store:
            for number in range(5):
                digest = store.open_namespace(step(number))
                seen[store._store.space(digest).id] += 1
                retire(store)
    assert len(seen) == 15


# --- many


class Reads:
    """Counts the records that a catalogue reads."""

    def __init__(self, monkeypatch):
        self.count = 0
        inner = Catalog._pairs_behind

        def counted(catalog, db, last):
            pairs = inner(catalog, db, last)
            self.count += len(pairs)
            return pairs

        monkeypatch.setattr(Catalog, "_pairs_behind", counted)


def test_opening_reads_no_other_namespace_and_a_trainer_leaves_nothing(monkeypatch):
    """A namespace a step, thousands of them, with a restart between."""
    steps, alive = 3000, 300
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:  # where a sync costs nothing
        path = Path(directory)
        for start in (0, steps):
            with open_store(path) as store:
                reads = Reads(monkeypatch)
                assert store._run(train(store._store, start, steps, alive), None) == alive
                assert reads.count == 0
                assert_nothing_is_left(store._store)
        assert catalogued(path) == 0


async def train(store: Store, first: int, steps: int, alive: int) -> int:
    """Open a namespace a step, so many of which are open at a time; the most there were."""
    most = 0
    for number in range(first, first + steps):
        await store.open_namespace(step(number))
        most = max(most, len(store._spaces))
        if number % alive == alive - 1:
            await store.keeping.registry.retire_idle(0)
    return most


def assert_nothing_is_left(store: Store) -> None:
    """Of all tables that know namespaces, when all have been retired."""
    spaces, allowances = store._spaces, store._spaces.allowances
    assert len(spaces) == len(spaces._used) == len(spaces._by_namespace) == len(spaces.epochs._epochs) == 0
    assert allowances._shares == allowances._of == allowances.all.ids == allowances.all.by_size == {}
    assert store._index.population == store._writer.room.used == store._leases._of_namespace == {}
    assert store._disk.catalog._ids == {}
    assert not store._disk._payloads


def test_a_killed_store_forgets_none_and_retires_them_later(tmp_path, victim):
    code = """
import sys, time
from pathlib import Path
from tests.kvstore.blocks import open_store
from tests.kvstore.test_retiring import retire, sized, step
store = open_store(Path(sys.argv[1]))
for number in range(20):
    store.open_namespace(step(number))
retire(store)
for number in range(20, 30):
    store.open_namespace(step(number))
store.open_namespace(sized(7))
print("open", flush=True)
time.sleep(600)
"""
    killed = victim(code, str(tmp_path))
    assert killed.line() == "open"
    killed.kill()
    with open_store(tmp_path) as store:
        assert store.status().namespaces == 11
        assert retire(store) == 11
        assert store.check() == []
    assert catalogued(tmp_path) == 0
    assert check(tmp_path).faults == []


def test_a_closed_namespace_that_holds_nothing_is_forgotten_at_the_start(tmp_path):
    huge = sized(1 << 16)  # 8 MiB a block
    with open_store(tmp_path, host_bytes=16 * MIB, disk_bytes=64 * MIB) as store:
        store.open_namespace(huge)
        store.open_namespace(step(1))
    with open_store(tmp_path) as store:
        assert store.status().namespaces == 1
    assert catalogued(tmp_path) == 1


# --- sizes of blocks


def test_with_the_last_namespace_of_a_block_size_its_files_and_slots_go(tmp_path, payload_kind):
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        hashes = chain(worker, A)
        for round_ in range(3):
            other = store.open_namespace(sized(100))
            nbytes = store._store.space(other).block_bytes
            theirs = block_hashes(other, A)
            assert store_chain(store, other, theirs, nbytes=nbytes)
            files = tmp_path / "payloads" / str(nbytes)
            assert files.exists()
            store.curate(lambda it, other=other: it.delete_namespaces(digest=other.hex()))
            assert retire(store) == 1, round_
            assert not files.exists()
            assert len(store._store.arena._classes) == 2
        assert load_chain(store, worker.namespace, hashes) == 4
        assert store.check() == []


def test_a_refused_namespace_leaves_nothing(tmp_path):
    with open_store(tmp_path) as store:
        before = len(store._store.arena._classes)
        with pytest.raises(CapacityTooSmall):
            store.open_namespace(sized(1 << 19))
        with pytest.raises(InvalidArgument, match=f"may have {MAX_DESCRIPTION}; shorten its"):
            store.open_namespace(Namespace(SMALL, model="m" * 4096, rope="r" * 4096))
        with pytest.raises(InvalidArgument, match="has 49"):
            store.open_namespace(Namespace(SMALL, model="\U0001f600" * 4096))
        assert len([each for each in store._store.arena._classes if each.nbytes]) == before
        assert not store._store._spaces.allowances._shares
        assert store.status().namespaces == 0


# --- shares


def occupy(store, namespace: Namespace, opener: str | None = None) -> bytes:
    """Open it and store something in it."""
    digest = store._run(store._store.open_namespace(namespace, opener))
    hashes = block_hashes(digest, tokens(1, 1))
    assert store_chain(store, digest, hashes, nbytes=namespace.layout.block_bytes)
    return digest


def test_a_tenant_has_its_share_of_namespaces_and_no_other_is_shut_out(tmp_path):
    with open_store(tmp_path, tenant_namespaces=3) as store:
        for number in range(3):
            occupy(store, step(number, "greedy"))
        with pytest.raises(NamespaceLimit, match=r"'greedy' has 3 namespaces in use.*tenant_namespaces"):
            store.open_namespace(step(3, "greedy"))
        assert occupy(store, step(0, "other"))
        assert store.open_namespace(step(1, "greedy"))  # is open already
        store.curate(lambda it: it.delete_namespaces(tenant="greedy"))
        assert occupy(store, step(3, "greedy"))


def test_sizes_of_blocks_are_shared_out_too(tmp_path, payload_kind):
    with open_store(tmp_path, tenant_block_sizes=2) as store:
        first = occupy(store, sized(10, "greedy"))
        occupy(store, sized(20, "greedy"))
        with pytest.raises(NamespaceLimit, match=r"'greedy' has 2 sizes of blocks.*tenant_block_sizes"):
            store.open_namespace(sized(30, "greedy"))
        assert occupy(store, sized(20, "greedy", salt="another of this size"))
        assert occupy(store, sized(30, "other"))
        store.curate(lambda it: it.delete_namespaces(digest=first.hex()))
        assert occupy(store, sized(30, "greedy"))
        assert store.check() == []


def test_a_caller_has_a_share_over_all_its_tenants(tmp_path):
    with open_store(tmp_path, tenant_namespaces=3) as store:
        for number in range(3):
            occupy(store, step(0, f"tenant {number}"), "gateway")
        with pytest.raises(NamespaceLimit, match="caller 'gateway' has 3 namespaces in use"):
            occupy(store, step(0, "tenant 3"), "gateway")
        assert occupy(store, step(0, "tenant 3"), "another")


def test_what_a_store_refuses_to_all_tells_nothing_of_others(tmp_path, monkeypatch):
    with open_store(tmp_path) as store:
        occupy(store, step(0, "one"))
        store._store._spaces.allowances.all.namespaces = 1
        with pytest.raises(NamespaceLimit) as refused:
            store.open_namespace(step(0, "two"))
        assert str(refused.value) == "this store has room for 1 namespaces, and no more; try again later"


def test_where_a_limit_is_reached_the_least_recently_used_that_is_empty_gives_way(tmp_path):
    with open_store(tmp_path, tenant_namespaces=4) as store:
        kept = occupy(store, step(0))
        opened = [store.open_namespace(step(number)) for number in (1, 2, 3)]
        store.match(opened[0], [], 1)
        store.open_namespace(step(4))
        spaces = store._store._spaces
        assert {space.digest for space in spaces} >= {kept, opened[0], opened[2]}
        assert len(spaces) == 4


@in_loop
async def test_those_that_are_being_opened_count(tmp_path):
    async with Bench(tmp_path, tenant_namespaces=3, tenant_block_sizes=2) as it:
        assert await it.store.durable(await it.put(it.hashes(1, 1)))
        async with catalogue_busy(it):
            opening = [await asked(it.store.open_namespace(step(number))) for number in range(5)]
        found = [await each for each in opening]
        assert sum(isinstance(each, NamespaceLimit) for each in found) == 3
        async with catalogue_busy(it):
            opening = [await asked(it.store.open_namespace(sized(n, "other"))) for n in (10, 20, 30)]
        found = [await each for each in opening]
        assert sum(isinstance(each, NamespaceLimit) for each in found) == 1


@in_loop
async def test_one_whose_opener_left_is_open_all_the_same_and_counts(tmp_path):
    async with Bench(tmp_path) as it:
        async with catalogue_busy(it):
            opening = asyncio.ensure_future(it.store.open_namespace(step(1)))
            await asyncio.sleep(0)
            opening.cancel()
            await asyncio.sleep(0)
        digest = await it.store.open_namespace(step(1))
        assert it.store.space(digest).namespace == step(1)
        assert it.store.status().namespaces == 2


def test_pages_are_bounded_in_bytes_and_have_all(tmp_path):
    with open_store(tmp_path) as store:
        for number in range(50):
            store.open_namespace(step(number))
        registry, seen, after = store._store.keeping.registry, [], 0
        while page := registry.page(after, 1000):
            assert 1 <= len(page) <= 5
            seen += [space.namespace for space in page]
            after = page[-1].id
        assert seen == [step(number) for number in range(50)]
        assert len(registry.page(0, 1)) == 1


def test_shares_of_nobody_are_not_kept():
    allowances = Allowances(2, 2)
    shares = allowances.shares("a", "caller")
    assert [share.whose for share in shares] == [("tenant", "a"), ("caller", "caller"), None]
    allowances.enter(1, 100, shares)
    assert allowances.ids_of("a") == {1}
    allowances.leave(1)
    assert allowances.ids_of("a") == set()
    assert not allowances._shares


def test_faulty_payloads_are_given_up_too(tmp_path):
    faults = faulty()
    with open_store(tmp_path, faults) as store:
        faults.fail_frees = True
        store.open_namespace(sized(50))
        assert retire(store) == 1
