"""Storing behind the answer: under pressure, through small arenas, beside other workers."""

import threading
from itertools import pairwise

import pytest

from kvstore.api import ReserveState
from kvstore.hashing import ROOT, block_hashes
from kvstore.units import UnitKind
from mla import LatentPool, attach
from mla.session import Session
from mla.storing import StoreQueue
from tests.mla.session.conftest import MIB, text
from tests.mla.zoo import build
from tests.server.conftest import start


class Delegate:
    """A real store, of which a subclass changes one verb."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)


@pytest.fixture
def full(model, embedded):
    """A store of a small arena in which nobody gets a slot until the returned lease is released."""
    store = embedded(host_bytes=2 * MIB, interval=0)
    namespace = store.open_namespace(Session(model, None, salt="other")._base)
    hashes = block_hashes(namespace, text(64 * 64, 9))
    answer = store.reserve(namespace, ROOT, hashes)
    assert answer.retry
    return store, answer.lease


def test_queued_stores_are_given_up_when_a_request_needs_their_pool_blocks(model, workers, full):
    store, _ = full
    worker = workers(model, store, pool_tokens=1024)
    worker.ask(text(600))
    # 9 blocks wait for a slot; the next request needs 10 of the pool's 16, and shares none.
    assert worker.hit(text(600, 1)) == 0
    assert worker.session.counters["store_dropped"] == 1
    assert not worker.session.flush(timeout=0.1)


def test_they_are_kept_when_the_next_request_shares_their_blocks(model, workers, full):
    store, lease = full
    worker = workers(model, store, pool_tokens=1024)
    worker.ask(text(600))
    assert worker.hit(text(600) + text(100, 1)) == 576
    assert worker.session.counters["store_dropped"] == 0
    store.release(lease)
    assert worker.session.flush()
    assert store.status().disk.blocks == 700 // 64


def test_a_request_that_needs_room_waits_for_no_store(model, workers, embedded):
    here, on = threading.Event(), threading.Event()

    class Stuck(Delegate):
        def reserve(self, *args, **kwargs):
            here.set()
            assert on.wait(60)
            return self.store.reserve(*args, **kwargs)

    store = embedded()
    worker = workers(model, Stuck(store), pool_tokens=1024)
    worker.ask(text(600))
    assert here.wait(60)
    worker.ask(text(900, 1))
    on.set()
    assert not worker.session.flush()
    assert worker.session.counters["store_dropped"] == 1
    assert worker.session.counters["dropped_blocks"] == 9
    other = workers(model, store)
    assert other.hit(text(900, 1)) == 896
    assert other.session.flush()
    assert store.status().leases == 0


def test_beams_count_when_room_is_made(model, workers, full):
    store, _ = full
    worker = workers(model, store, pool_tokens=1024)
    worker.ask(text(400))
    worker.ask(text(200, 1), new=70, num_beams=2)
    assert worker.session.counters["store_dropped"] == 0
    worker.ask(text(200, 1), new=70, num_beams=4)
    assert worker.session.counters["store_dropped"] > 0


def test_what_finds_no_room_before_its_deadline_is_dropped(model, workers, full):
    store, lease = full
    worker = workers(model, store, store_deadline=0.05)
    worker.ask(text(600))
    assert not worker.session.flush()
    counters = worker.session.counters
    assert (counters["store_expired"], counters["dropped_blocks"], counters["stored_blocks"]) == (1, 9, 0)
    # It is over with that: what comes when there is room is stored whole.
    store.release(lease)
    assert worker.hit(text(600)) == 576
    assert worker.session.flush()
    assert workers(model, store).hit(text(600)) == 576


def test_closing_gives_up_what_finds_no_room(model, full):
    store, _ = full
    session = Session(model, store, pool_tokens=1024)
    session.generate(text(300), max_new_tokens=1)
    session.close(timeout=0.05)
    assert session.counters["dropped_blocks"] == 4
    assert session.pool.available == session.pool.num_blocks


def test_closing_stores_what_is_queued(model, workers, embedded):
    store = embedded()
    worker = workers(model, store)
    worker.ask(text(600))
    worker.session.close()
    assert workers(model, store).hit(text(600)) == 576


def test_a_document_larger_than_the_arena_goes_through_it(model, workers, embedded):
    prompt = text(60 * 64 + 1)  # 2.4 MB in an arena of 1 MiB
    store = embedded(host_bytes=MIB)
    worker = workers(model, store)
    worker.ask(prompt)
    assert worker.session.flush()
    assert worker.session.counters["stored_blocks"] == 60
    assert workers(model, store).hit(prompt) == 3840
    worker.session.close()
    assert workers(model, embedded(host_bytes=MIB)).hit(prompt) == 3840


def test_flush_is_durable_when_the_daemon_is_killed_at_once(model, workers, fleet, flags):
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    worker = workers(model, client)
    for seed in range(3):
        worker.ask(text(500, seed), new=100)
        assert worker.session.flush()
        daemon.kill()
        daemon.restart()
        assert workers(model, client).hit(text(500, seed)) == 448


class Chain:
    """Pool blocks with hashes, to be queued by hand."""

    def __init__(self, model, store, blocks):
        layout = attach(model).layout
        self.pool = LatentPool(layout, blocks)
        self.namespace = store.open_namespace(Session(model, None)._base)
        self.hashes = block_hashes(self.namespace, text(64 * blocks))
        self.blocks = self.pool.allocate(blocks)

    def add(self, job, first, stop):
        units = {stop: UnitKind.REQUEST_END}
        job.add(self.hashes[first:stop], self.blocks[first:stop], units)

    def matched(self, store):
        return store.match(self.namespace, self.hashes, 64 * len(self.hashes) + 1).blocks


def test_a_lease_that_ended_meanwhile_is_replaced(model, embedded):
    store = embedded()
    chain = Chain(model, store, 12)
    queue = StoreQueue(chain.pool, store, deadline=10)
    job = queue.job(lambda: chain.namespace)
    for first, stop in pairwise((0, 4, 8, 12)):
        chain.add(job, first, stop)
        assert queue.flush(10)
        store.release(job.lease)
    job.finish()
    assert queue.flush(10)
    assert chain.matched(store) == 12
    assert store.status().leases == 0
    queue.close(10)


def test_a_job_outlives_its_daemon_if_what_it_stored_does(model, fleet, flags):
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    chain = Chain(model, client, 8)
    queue = StoreQueue(chain.pool, client, deadline=10)
    job = queue.job(lambda: chain.namespace)
    chain.add(job, 0, 4)
    assert queue.flush(10)
    daemon.restart()
    chain.add(job, 4, 8)
    job.finish()
    assert queue.flush(10)
    assert chain.matched(client) == 8
    queue.close(10)


@pytest.fixture
def half_filled(model, fleet, flags):
    """A daemon, and a first client that has reserved blocks 4 to 7 of 12 and not filled them yet."""
    daemon = start(fleet, "mapped", flags)
    one, two = fleet.connect(daemon.url), fleet.connect(daemon.url)
    chain, _ = Chain(model, one, 12), Chain(model, two, 12)
    first = StoreQueue(chain.pool, one, deadline=10)
    job = first.job(lambda: chain.namespace)
    chain.add(job, 0, 4)
    assert first.flush(10)
    reserved = one.reserve(chain.namespace, chain.hashes[3], chain.hashes[4:8])
    assert {block.state for block in reserved.blocks} == {ReserveState.FILL}
    second = StoreQueue(chain.pool, two, deadline=60)
    yield one, two, chain, reserved, second
    second.close(10)
    first.close(10)


def store_all(queue, chain):
    job = queue.job(lambda: chain.namespace)
    chain.add(job, 0, len(chain.hashes))
    job.finish()


def test_blocks_that_another_worker_fills_are_waited_for(half_filled):
    one, two, chain, reserved, queue = half_filled
    store_all(queue, chain)
    assert not queue.flush(0.3)
    for block, source in zip(reserved.blocks, chain.blocks[4:8], strict=True):
        chain.pool.read_blocks([source], [block.data], chain.pool.mark())
    one.commit(reserved.lease, chain.hashes[4:8])
    assert queue.flush(60)
    assert chain.matched(two) == 12
    assert queue.counters()["stored_blocks"] == 4


def test_blocks_of_a_worker_that_died_are_filled(half_filled):
    one, two, chain, _, queue = half_filled
    store_all(queue, chain)
    assert not queue.flush(0.3)
    one.close()
    assert queue.flush(60)
    assert chain.matched(two) == 12
    assert queue.counters()["stored_blocks"] == 8


def test_two_workers_may_store_one_prompt_at_once(workers, fleet, flags):
    daemon = start(fleet, "mapped", flags)
    prompt = text(1500)
    models = [build("deepseek_v3"), build("deepseek_v3")]
    pair = [workers(model, fleet.connect(daemon.url)) for model in models]
    together = threading.Barrier(2)
    sure = []

    def work(worker):
        together.wait()
        worker.ask(prompt)
        sure.append(worker.session.flush())

    threads = [threading.Thread(target=work, args=(worker,)) for worker in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sure == [True, True]
    stored = sum(worker.session.counters["stored_blocks"] for worker in pair)
    assert stored == 1500 // 64
    daemon.restart()
    assert workers(models[0], fleet.connect(daemon.url)).hit(prompt) == 1472


def test_beams_store_their_prompt_and_answer_as_without_a_store(model, workers, embedded):
    store = embedded()
    prompt = text(300)
    cold = workers(model, None).ask(prompt, new=20, num_beams=3)
    first = workers(model, store)
    assert first.ask(prompt, new=20, num_beams=3).tokens == cold.tokens
    assert first.session.flush()
    assert store.status().disk.blocks == 4  # of the prompt; beams leave no answer
    second = workers(model, store).ask(prompt, new=20, num_beams=3)
    assert second.usage.prompt_cache_hit_tokens == 256
    assert second.tokens == cold.tokens
