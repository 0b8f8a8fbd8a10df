"""What every store must do with memory that it lends, and with what is dropped; in ``StoreConformance``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.api import ReserveState
from kvstore.errors import StillWritten
from kvstore.hashing import ROOT, block_hashes
from kvstore.testing.chains import (
    SMALL,
    Conversation,
    content,
    end_of,
    eventually,
    load_chain,
    store_chain,
    tokens,
)

A = tokens(0, 100)

Arrive = Callable[..., Conversation]

# What keeps a block in sight though its view has ended.
LOOKS: dict[str, Callable[[memoryview], Any]] = {
    "array": lambda view: np.frombuffer(view, np.uint8),
    "part": lambda view: view[16:64],
    "cast": lambda view: view.cast("B"),
}


class ViewConformance:
    """Uses the fixture ``arrive`` of the class that it is mixed into."""

    def test_a_loaded_view_is_dead_after_its_step(self, arrive: Arrive) -> None:
        worker = arrive()
        hashes = block_hashes(worker.namespace, A[: 64 * 30])
        store_chain(worker.store, worker.namespace, hashes)
        views: list[memoryview] = []
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
        # More than the arena has: whatever is free is used.
        other = block_hashes(worker.namespace, tokens(700, 100))
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
        other = block_hashes(worker.namespace, tokens(750, 100))
        assert store_chain(worker.store, worker.namespace, other)
        for one in kept:
            one[0] ^= 255
        assert load_chain(worker.store, worker.namespace, other) == 100
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
