"""What is deleted from the store leaves a DEVICE pool too; a request in flight does not bring it back."""

import threading

from kvstore.api import Tier
from tests.mla.session.conftest import text

A, B = text(700, 1), text(700, 2)
BLOCKS = 699 // 64


def delete_all(store):
    return store.curate(lambda it: it.delete_namespaces(tenant="default"))


def test_what_is_deleted_leaves_the_pool_with_the_next_request(model, workers, embedded):
    store = embedded()
    worker = workers(model, store)
    worker.ask(A)
    assert worker.session.flush()
    assert worker.ask(A).usage.hit_tokens_by_tier == {Tier.DEVICE: 64 * BLOCKS}
    assert delete_all(store).blocks == BLOCKS
    assert worker.ask(A).usage.prompt_cache_hit_tokens == 0
    assert worker.session.counters["forgotten_blocks"] >= BLOCKS
    assert worker.session.flush()  # it is a new request's now
    assert worker.hit(A) == 64 * BLOCKS


def test_a_deletion_elsewhere_forgets_the_namespace_and_nothing_more(model, workers, embedded):
    store = embedded()
    ours, theirs = workers(model, store), workers(model, store, tenant="other")
    for worker in (ours, theirs):
        worker.ask(A)
        assert worker.session.flush()
    assert store.curate(lambda it: it.delete_namespaces(tenant="other")).blocks == BLOCKS
    assert ours.ask(A).usage.hit_tokens_by_tier == {Tier.DEVICE: 64 * BLOCKS}
    assert theirs.hit(A) == 0


def test_blocks_that_were_queued_before_are_not_stored_after(model, workers, embedded):
    """The model was at work, or the queue, when the deletion came."""
    store = embedded()
    here, on = threading.Event(), threading.Event()
    reserve = store.reserve

    def late(*args, **kwargs):
        here.set()
        assert on.wait(60)
        return reserve(*args, **kwargs)

    worker = workers(model, store)
    worker.ask(B)
    assert worker.session.flush()
    store.reserve = late
    worker.ask(A)
    assert here.wait(60)
    delete_all(store)
    on.set()
    assert not worker.session.flush()
    assert worker.session.counters["store_failed_EpochPassed"] == 1
    assert store.status().disk.blocks == store.status().host.blocks == 0
    assert worker.hit(A) == 0
