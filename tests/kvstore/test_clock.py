"""The wall clock is set back and forward, before and after restarts: life and order go on as time does."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections import Counter
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st

from kvstore.catalog import Catalog
from kvstore.clock import STEP_SECONDS, StoreTime
from kvstore.settings import MIB
from kvstore.store import Store
from kvstore.testing.clocks import SteppedClock
from tests.kvstore.blocks import (
    DAY,
    Conversation,
    in_loop,
    later,
    load_chain,
    open_store,
    settings,
    tokens,
    until,
)
from tests.kvstore.test_expiry import chain
from tests.kvstore.test_pins import pin

A, B, C = (tokens(seed, 12) for seed in range(3))
STEPS = [-DAY, DAY, -1000 * DAY, 1000 * DAY]
DOWN = 3 * 3600.0  # time for which a store is closed


def stepped(step: float, passed: float = 0.0) -> SteppedClock:
    clock = later(passed)
    clock.step = step
    return clock


def counted(store) -> int:
    return store.status().counters.get("clock_steps", 0)


# --- in one run


@pytest.mark.parametrize("step", STEPS)
def test_a_step_neither_expires_what_is_in_use_nor_keeps_what_is_not(tmp_path, step):
    clock = later(0)
    with open_store(tmp_path, clock=clock) as store:
        worker = Conversation(store)
        idle, busy = chain(worker, A), chain(worker, B)
        clock.step = step
        assert store.expire(clock.wall()) == 0
        clock.passed = DAY - 3600
        load_chain(store, worker.namespace, busy)
        assert store.expire(clock.wall()) == 0
        clock.passed = DAY + 60
        assert store.expire(clock.wall()) == 12
        assert load_chain(store, worker.namespace, idle) == 0
        assert load_chain(store, worker.namespace, busy) == 12
        assert counted(store) == 1
        assert store.check() == []


@pytest.mark.parametrize("step", STEPS)
def test_an_age_goes_on_evenly(tmp_path, step):
    clock = later(0)
    with open_store(tmp_path, clock=clock, ttl_seconds=0, max_age_seconds=DAY) as store:
        worker = Conversation(store)
        chain(worker, A)
        clock.step = step
        chain(worker, B)
        assert store.expire(clock.wall()) == 0
        clock.passed = DAY + 60
        assert store.expire(clock.wall()) == 24


@pytest.mark.parametrize("step", STEPS)
def test_the_least_recently_used_leaves_first_whatever_the_clock_showed_at_its_use(tmp_path, step):
    clock = later(0)
    with open_store(tmp_path, clock=clock) as store:
        worker = Conversation(store)
        idle = chain(worker, A)
        clock.step = step
        busy = chain(worker, B)
        clock.step = 0.0
        index = store._store._index
        order = [index.used[index.find(chained[-1])] for chained in (idle, busy)]
        assert order == sorted(order)
        fill_disk_until_gone(worker, idle)
        assert load_chain(store, worker.namespace, busy) == 12


def fill_disk_until_gone(worker: Conversation, hashes) -> None:
    """Store other documents until this one has left."""
    for seed in range(100, 300):
        chain(worker, tokens(seed, 10))
        if worker.store._store._index.find(hashes[-1]) < 0:
            return
    raise AssertionError("nothing was evicted")


@pytest.mark.parametrize("step", STEPS)
def test_a_pin_lasts_as_long_as_it_was_given_for(tmp_path, step):
    clock = later(0)
    with open_store(tmp_path, clock=clock) as store:
        worker = Conversation(store)
        made = pin(store, chain(worker, A)[-1], 7 * DAY)
        clock.step = step
        clock.passed = 6 * DAY
        assert store.expire(clock.wall()) == 0
        (shown,) = store.curate(lambda it: it.pins())
        assert shown.expires - clock.wall() == pytest.approx(DAY, abs=60)
        longer = store.curate(lambda it: it.extend(made.handle, 2 * DAY))
        assert longer.expires - clock.wall() == pytest.approx(2 * DAY, abs=60)
        clock.passed = 9 * DAY
        assert store.expire(clock.wall()) == 12


def test_people_are_shown_wall_times(tmp_path):
    clock = later(0)
    with open_store(tmp_path, clock=clock) as store:
        worker = Conversation(store)
        hashes = chain(worker, A)
        clock.step = -DAY
        clock.passed = 3600
        unit = store.curate(lambda it: it.unit(hashes[-1].hex()))
        assert clock.wall() - unit.used == pytest.approx(3600, abs=60)
        store.curate(lambda it: it.delete_unit(hashes[-1].hex()))
        told = store._call(lambda: store._store.trail(worker.namespace, hashes, 769, align=64))
        assert told.gone is not None
        assert clock.wall() - told.gone.at == pytest.approx(0, abs=60)


@in_loop
async def test_a_step_is_logged_counted_and_noted_and_jitter_is_not(tmp_path, caplog):
    clock = later(0)
    store = await Store.open(settings(tmp_path), clock=clock)
    time = store.time
    clock.step = STEP_SECONDS / 2
    time.look()
    assert (time.due(), store.counters["clock_steps"]) == ({}, 0)
    with caplog.at_level(logging.WARNING):
        clock.step = -DAY
        await until(lambda: store.counters["clock_steps"] == 1)  # nobody asks: it watches by itself
        await until(lambda: not time.due())
    assert "event=clock_step seconds=-86400" in caplog.text
    await store.close()


# --- over restarts


@pytest.mark.parametrize("back", [False, True], ids=["right again", "still wrong"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_in_one_run_does_not_age_anything_in_the_next(tmp_path, step, back):
    """Whether the clock was put right while the store was closed, or stays as it is."""
    clock = later(0)
    with open_store(tmp_path, clock=clock) as store:
        worker = Conversation(store)
        idle = chain(worker, A)
        clock.step = step
        busy = chain(worker, B)
    clock = stepped(step if back else 0.0, DOWN)
    with open_store(tmp_path, clock=clock) as store:
        worker = Conversation(store)
        assert store.expire(clock.wall()) == 0
        index = store._store._index
        assert index.used[index.find(idle[-1])] < index.used[index.find(busy[-1])]
        assert load_chain(store, worker.namespace, busy) == 12
        clock.passed = 2 * DAY + DOWN
        assert load_chain(store, worker.namespace, busy) == 12
        assert store.expire(clock.wall()) == 12
        assert load_chain(store, worker.namespace, busy) == 12


@pytest.mark.parametrize("step", [-DAY, -1000 * DAY])
def test_what_lies_in_the_future_at_a_start_is_older_than_what_is_used_from_then_on(tmp_path, step):
    """The clock was set back while the store was closed: its records are from times that are to come."""
    with open_store(tmp_path) as store:
        worker = Conversation(store)
        idle, busy = chain(worker, A), chain(worker, B)
        made = pin(store, chain(worker, C)[-1], 7 * DAY)
    clock = stepped(step, 60.0)
    with open_store(tmp_path, clock=clock) as store:
        worker = Conversation(store)
        assert counted(store) == 1
        (kept,) = store.curate(lambda it: it.pins())
        assert kept.handle == made.handle
        assert 6 * DAY < kept.expires - clock.wall() < 8 * DAY
        unit = store.curate(lambda it: it.unit(busy[-1].hex()))
        assert unit.used <= clock.wall() + 1
        load_chain(store, worker.namespace, busy)
        fill_disk_until_gone(worker, idle)
        assert load_chain(store, worker.namespace, busy) == 12
        clock.passed += DAY + 60
        store.expire(clock.wall())
        assert store.status().disk.blocks == 12  # what is pinned
        clock.passed += 7 * DAY
        store.expire(clock.wall())
        assert store.status().disk.blocks == 0


def test_time_that_passed_while_the_store_was_closed_counts(tmp_path):
    with open_store(tmp_path) as store:
        chain(Conversation(store), A)
    clock = later(2 * DAY)
    with open_store(tmp_path, clock=clock) as store:
        assert counted(store) == 0
        assert store.expire(clock.wall()) == 12


def test_a_step_is_noted_at_once_so_that_a_killed_store_knows_it(tmp_path, victim):
    code = """
import sys, time
from pathlib import Path
from tests.kvstore.blocks import Conversation, later, open_store, tokens
from tests.kvstore.test_expiry import chain
clock = later(0)
store = open_store(Path(sys.argv[1]), clock=clock)
chain(Conversation(store), tokens(1, 12))
clock.step = 86400.0 * 2
while store._store.time._noted == 0:
    time.sleep(0.01)
print("noted", flush=True)
time.sleep(600)
"""
    killed = victim(code, str(tmp_path))
    assert killed.line() == "noted"
    killed.kill()
    clock = stepped(2 * DAY)
    with open_store(tmp_path, clock=clock) as store:
        assert store.expire(clock.wall()) == 0
        assert store.status().disk.blocks == 12


# --- whatever comes


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.floats(-3 * DAY, 3 * DAY)),
        st.tuples(st.just("pass"), st.floats(0, DAY)),
        st.tuples(st.just("use"), st.none()),
        st.tuples(st.just("restart"), st.floats(0, DAY)),
    ),
    max_size=20,
)


@given(EVENTS)
@drawn(max_examples=60, deadline=None)
def test_the_stores_time_never_goes_back_and_never_runs_ahead_of_what_has_passed(events):
    """Steps come while it runs. At a restart it may lose time, which keeps things longer, but never gains."""
    with tempfile.TemporaryDirectory() as path, closing(Catalog.open(Path(path) / "catalog", MIB)) as catalog:
        clock = later(0)
        time = StoreTime(clock, Counter())
        time.restore(catalog, 0.0)
        used = [(clock.passed, time.now())]
        for event, value in events:
            if event == "step":
                clock.step = value
                time.look()
            elif event == "pass":
                clock.passed += value
            elif event == "restart":
                if notes := time.due():
                    catalog.commit(notes=notes)
                clock.passed += value
                time = StoreTime(clock, Counter())
                time.restore(catalog, used[-1][1])
            used.append((clock.passed, time.now()))
        for (passed, then), (passes, now) in pairwise(used):
            assert then <= now
            assert now - then <= passes - passed + STEP_SECONDS + 5


def test_a_damaged_note_is_as_none(tmp_path):
    with closing(Catalog.open(tmp_path / "catalog", MIB)) as catalog:
        catalog.commit(notes={b"clock/skew": b"what"})
        time = StoreTime(later(0), Counter())
        time.restore(catalog, 0.0)
        assert time.of_wall(0.0) == 0.0


@in_loop
async def test_what_was_never_seen_before_is_recorded_by_any_clock(tmp_path):
    """A machine without a clock of its own starts in 1970, one that is wrong may be in 2200."""
    for step in (-100 * 365 * DAY, 200 * 365 * DAY):
        store = await Store.open(settings(tmp_path / f"{step}"), clock=stepped(step))
        assert 0 <= store.time.now() < 1 << 32
        await store.close()
        await asyncio.sleep(0)
