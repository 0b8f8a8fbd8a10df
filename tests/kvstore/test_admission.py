"""Which blocks go to disk: second-sight admission, and quotas of tenants."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidArgument
from kvstore.hashing import ROOT, block_hashes
from kvstore.namespace import Namespace
from kvstore.settings import MIB
from tests.kvstore.blocks import (
    SMALL,
    Conversation,
    content,
    end_of,
    load_chain,
    open_store,
    store_chain,
    tokens,
)
from tests.kvstore.test_expiry import DAY
from tests.kvstore.test_pins import pin

A, B, C = (tokens(seed, 12) for seed in range(3))


def request(worker: Conversation, ids) -> bool:
    """Serve a prompt as a worker does: match, load, store; whether all of it is durable."""
    hashes = block_hashes(worker.namespace, ids)
    match = worker.store.match(worker.namespace, hashes, len(ids), store=True)
    assert load_chain(worker.store, worker.namespace, hashes[: match.blocks]) == match.blocks
    return store_chain(worker.store, worker.namespace, hashes)


def flood(worker: Conversation, seeds) -> None:
    """Take the whole arena for other documents."""
    for seed in seeds:
        request(worker, tokens(seed, 40))


# --- second sight


def test_what_is_seen_once_stays_in_memory_and_is_not_durable(tmp_path):
    with open_store(tmp_path, admit="second") as store:
        worker = Conversation(store)
        assert not request(worker, A)
        status = store.status()
        assert (status.disk.blocks, status.host.blocks, status.dirty_blocks, status.mode) == (0, 12, 0, "ok")
        assert status.counters["unadmitted_blocks"] == 12
        assert worker.match(A).blocks == 11  # it is a hit all the same
        assert store.check() == []
    with open_store(tmp_path, admit="second") as store:
        assert Conversation(store).match(A).stored_blocks == 0


def test_what_is_hit_again_in_memory_goes_to_disk_whole(tmp_path):
    with open_store(tmp_path, admit="second") as store:
        worker = Conversation(store)
        request(worker, A)
        assert request(worker, A)
        assert store.status().disk.blocks == 12
        assert store.check() == []
    with open_store(tmp_path, admit="second") as store:
        worker = Conversation(store)
        assert load_chain(store, worker.namespace, block_hashes(worker.namespace, A)) == 12
        assert store.status().units == 1


def test_what_left_memory_is_known_when_it_comes_again(tmp_path):
    with open_store(tmp_path, admit="second") as store:
        worker = Conversation(store)
        request(worker, A)
        flood(worker, range(10, 14))
        assert worker.match(A).stored_blocks == 0
        assert store.status().mode == "ok"
        assert store.status().counters.get("host_lost_blocks", 0) == 0
        assert request(worker, A)
        assert store.check() == []
    with open_store(tmp_path, admit="second") as store:
        assert Conversation(store).match(A).blocks == 11


def test_a_new_end_of_a_known_beginning_waits_for_its_second_time(tmp_path):
    with open_store(tmp_path, admit="second") as store:
        worker = Conversation(store)
        request(worker, A)
        request(worker, A)
        assert not request(worker, A + B)
        assert store.status().disk.blocks == 12
        assert request(worker, A + B)
        assert store.status().disk.blocks == 24


def test_chunks_of_one_request_are_no_second_sight(tmp_path):
    with open_store(tmp_path, admit="second") as store:
        worker = Conversation(store)
        hashes = block_hashes(worker.namespace, A)
        parent, lease = ROOT, 0
        for at in range(0, 12, 3):
            answer = store.reserve(worker.namespace, parent, hashes[at : at + 3], lease=lease)
            lease, parent = answer.lease, hashes[at + 2]
            for block in answer.blocks:
                block.data[:] = content(block.hash, SMALL.block_bytes)
            ticket = store.commit(lease, hashes[at : at + 3])
            assert not store.durable(ticket)
        assert not store.durable(store.commit(lease, [], end_of(hashes)))
        store.release(lease)
        assert store.status().disk.blocks == 0
        other = store.reserve(worker.namespace, hashes[5], hashes[6:9])  # another one goes on behind it
        assert store.durable(store.commit(other.lease, [], end_of(hashes[:9])))
        store.release(other.lease)
        assert store.status().disk.blocks == 9
        assert store.check() == []


def test_what_stands_behind_a_block_that_left_memory_is_not_written_before_it(tmp_path):
    with open_store(tmp_path, admit="second") as store:
        worker = Conversation(store)
        hashes = block_hashes(worker.namespace, A)
        request(worker, A)
        request(worker, tokens(9, 77))  # the arena has 85 slots: the first blocks of A make room
        answer = store.reserve(worker.namespace, hashes[7], [])  # another worker goes on behind the eighth
        store.release(answer.lease)
        status = store.status()
        assert (status.disk.blocks, status.dirty_blocks) == (0, 0)
        assert worker.match(A).stored_blocks == 0
        assert request(worker, A)
        assert store.status().disk.blocks == 12
        assert store.check() == []
    with open_store(tmp_path, admit="second") as store:
        assert load_chain(store, worker.namespace, hashes) == 12


def test_a_pin_is_a_reason_to_write(tmp_path):
    with open_store(tmp_path, admit="second") as store:
        worker = Conversation(store)
        request(worker, A)
        pin(store, block_hashes(worker.namespace, A)[-1])
        assert store.status().disk.blocks == 12
        assert store.check() == []


def test_what_is_in_memory_only_expires_and_is_deleted(tmp_path):
    with open_store(tmp_path, admit="second") as store:
        worker = Conversation(store)
        for ids in (A, B):
            request(worker, ids)
        store.curate(lambda it: it.delete_unit(block_hashes(worker.namespace, A)[-1].hex()))
        assert (worker.match(A).stored_blocks, worker.match(B).stored_blocks) == (0, 12)
        index = store._store._index
        assert store.expire(max(index.used) + DAY + 1) == 12
        assert store.status().host.used_bytes == 0
        assert store.check() == []


# --- quotas

QUOTA = 50 * 16384  # of blocks as the files hold them, more or less


class Shop:
    """A store with two tenants, of which one has a quota."""

    def __init__(self, path, **changes) -> None:
        quotas = {"tenant_quotas": {"small": QUOTA}} | changes
        self.store = open_store(path, host_bytes=4 * MIB, **quotas)
        self.small, self.large = (self.tenant(name) for name in ("small", "large"))

    def tenant(self, name: str, salt: str = "") -> Conversation:
        worker = Conversation(self.store)
        worker.namespace = self.store.open_namespace(Namespace(layout=SMALL, tenant=name, salt=salt))
        return worker

    def used(self, name: str) -> int:
        store = self.store._store
        return sum(store._writer.room.used[s.id] for s in store._spaces if s.namespace.tenant == name)


@pytest.fixture
def shop(tmp_path):
    made = []

    def make(**changes):
        for before in made:
            before.store.close()
        made.append(Shop(tmp_path, **changes))
        return made[-1]

    yield make
    assert made[-1].store.check() == []
    made[-1].store.close()


def test_a_tenant_over_its_quota_evicts_its_own_oldest_tails_and_nobody_elses(shop):
    it = shop()
    other = it.tenant("small", salt="another namespace of the same tenant")
    large = block_hashes(it.large.namespace, tokens(1, 60))
    assert store_chain(it.store, it.large.namespace, large)
    chains = {}
    for seed in range(2, 9):
        worker = other if seed % 2 else it.small
        chains[seed] = (worker, block_hashes(worker.namespace, tokens(seed, 12)))
        assert store_chain(it.store, worker.namespace, chains[seed][1])
        assert it.used("small") <= QUOTA
    assert load_chain(it.store, it.large.namespace, large) == 60
    there = [
        seed
        for seed, (worker, hashes) in chains.items()
        if load_chain(it.store, worker.namespace, hashes) == 12
    ]
    assert there == sorted(chains)[-len(there) :]
    assert 2 <= len(there) < 7
    assert it.store.status().mode == "ok"


def test_the_default_holds_for_those_without_a_quota_of_their_own(shop):
    it = shop(tenant_bytes=QUOTA, tenant_quotas={"large": 0})
    for worker, blocks in ((it.small, 120), (it.large, 120)):
        for seed in range(blocks // 12):
            store_chain(it.store, worker.namespace, block_hashes(worker.namespace, tokens(seed, 12)))
    assert it.used("small") <= QUOTA
    assert it.used("large") > QUOTA


def test_what_does_not_fit_into_a_quota_stays_in_memory_and_others_are_written(shop):
    it = shop()
    hashes = block_hashes(it.small.namespace, tokens(2, 100))
    assert not store_chain(it.store, it.small.namespace, hashes)
    assert it.used("small") <= QUOTA
    assert it.store.status().counters["quota_declined_blocks"] > 0
    assert load_chain(it.store, it.small.namespace, hashes) == 100
    assert it.store.status().mode == "ok"
    assert store_chain(it.store, it.large.namespace, block_hashes(it.large.namespace, tokens(3, 60)))
    assert it.store.check() == []


def test_what_a_quota_had_no_room_for_is_written_when_it_is_seen_again_and_there_is(shop):
    it = shop()
    hashes = block_hashes(it.small.namespace, tokens(2, 24))
    pinned = [block_hashes(it.small.namespace, tokens(seed, 24)) for seed in (3, 4)]
    handles = []
    for chain in pinned[:1]:
        assert store_chain(it.store, it.small.namespace, chain)
        handles.append(pin(it.store, chain[-1]).handle)
    assert store_chain(it.store, it.small.namespace, pinned[1])
    handles.append(pin(it.store, pinned[1][-1]).handle)
    assert not store_chain(it.store, it.small.namespace, hashes)
    for handle in handles:
        it.store.curate(lambda curator, handle=handle: curator.unpin(handle))
    assert load_chain(it.store, it.small.namespace, hashes) == 24
    assert store_chain(it.store, it.small.namespace, hashes)
    assert it.used("small") <= QUOTA


def test_a_lowered_quota_is_kept_from_the_start(shop):
    it = shop(tenant_quotas={})
    for seed in range(10):
        assert store_chain(it.store, it.small.namespace, block_hashes(it.small.namespace, tokens(seed, 12)))
    assert it.used("small") > QUOTA
    it = shop()
    assert 0 < it.used("small") <= QUOTA


@pytest.mark.parametrize("wrong", [{"admit": "third"}, {"tenant_bytes": -1}, {"tenant_quotas": {"a": -1}}])
def test_a_setting_that_is_none_is_refused(tmp_path, wrong):
    with pytest.raises(InvalidArgument, match=r"admit|tenant_bytes"):
        open_store(tmp_path, **wrong)
