"""Background tasks that die are counted, logged and started again; one that dies for good ends its owner."""

import asyncio
import logging
from collections import Counter

import pytest

from kvstore.errors import Unavailable
from kvstore.supervision import Supervisor
from tests.kvstore.blocks import DEADLINE, in_loop, until
from tests.kvstore.test_pipeline import Pipes
from tests.kvstore.test_writeback import Bench


class Work:
    """Fails so many times, then runs for ever."""

    def __init__(self, failures, error=RuntimeError):
        self.failures, self.error, self.begun = failures, error, 0

    async def run(self):
        self.begun += 1
        if self.begun <= self.failures:
            raise self.error("a defect")
        await asyncio.Event().wait()


@in_loop
async def test_a_task_that_fails_is_counted_logged_with_its_traceback_and_started_again(caplog):
    counters = Counter()
    supervisor, work = Supervisor(counters, pauses=(0, 0, 0)), Work(2)
    supervisor.start("work", work.run)
    await until(lambda: work.begun == 3)
    assert counters["task_failures"] == 2
    assert caplog.text.count("event=task_failed task=work") == 2
    assert "raise self.error" in caplog.text
    await until(lambda: not supervisor.restarting)
    assert not supervisor.gave_up.is_set()
    await supervisor.stop("work")


@in_loop
async def test_a_task_that_fails_again_and_again_is_given_up(caplog):
    supervisor, work = Supervisor(Counter(), pauses=(0, 0)), Work(99)
    supervisor.start("work", work.run)
    await asyncio.wait_for(supervisor.gave_up.wait(), DEADLINE)
    assert work.begun == 3
    assert (
        supervisor.why
        == "the background task work failed 3 times in a row, last with RuntimeError('a defect')"
    )
    assert [record.levelno for record in caplog.records][-1] == logging.CRITICAL
    await supervisor.ended("work")


@in_loop
async def test_a_task_that_was_cancelled_by_a_stranger_is_started_again():
    supervisor, work = Supervisor(Counter(), pauses=(0,)), Work(0)
    supervisor.start("work", work.run)
    await until(lambda: work.begun == 1)
    supervisor.kill("work")
    await until(lambda: work.begun == 2)
    await supervisor.stop("work")
    assert work.begun == 2


@in_loop
async def test_work_that_returns_has_ended_well_and_what_is_stopped_fails_not():
    counters, stopped = Counter(), Work(0)
    supervisor = Supervisor(counters, pauses=(0,))

    async def short():
        pass

    supervisor.start("short", short)
    supervisor.start("stopped", stopped.run)
    await supervisor.ended("short")
    await until(lambda: stopped.begun == 1)
    await supervisor.stop("stopped", "never started")
    assert not counters
    assert not supervisor.restarting


@in_loop
async def test_a_watched_task_whose_failure_comes_out_ends_the_owner():
    supervisor = Supervisor(Counter())
    supervisor.watch(asyncio.create_task(Work(1).run(), name="batch"))
    await asyncio.wait_for(supervisor.gave_up.wait(), DEADLINE)
    assert "batch failed" in supervisor.why


# --- in a store


@in_loop
async def test_a_writer_that_dies_goes_on_where_it_was(tmp_path):
    async with Pipes(tmp_path) as it:
        it.faults.write_gate.clear()
        first = await it.put(it.hashes(1, 64))
        await until(lambda: it.faults.writes > 0)
        second = await it.put(it.hashes(2, 8))
        it.store.supervisor.kill("writer")
        await until(lambda: it.store.counters["task_failures"] == 1)
        assert it.store.status().mode == "degraded"
        it.faults.write_gate.set()
        assert await it.store.durable(first)
        assert await it.store.durable(second)
        assert it.store.status().mode == "ok"
        index = it.store._index
        assert all(index.holds[row] == 0 for row in index)
        assert it.store.held().slots == 0


@in_loop
async def test_a_defect_while_a_batch_is_made_loses_nothing_and_ends_nothing(tmp_path, caplog):
    async with Pipes(tmp_path) as it:
        hashes = it.hashes(1, 40)
        it.faults.defects = 1
        await it.put(hashes)
        await until(lambda: it.store.counters["write_failures"] == 1)
        assert "injected: a defect" in caplog.text
        await it.settled()
        assert all(it.on_disk(hashes))
        assert await it.store.durable(await it.put(it.hashes(2, 8)))
        index = it.store._index
        assert all(index.holds[row] == 0 for row in index)
        assert it.store.held().slots == 0


@in_loop
async def test_an_exception_in_the_writers_loop_itself_is_survived(tmp_path):
    async with Pipes(tmp_path) as it:
        writer, begin = it.store._writer, it.store._writer._begin

        def broken():
            writer._begin = begin
            raise RuntimeError("a defect")

        writer._begin = broken
        assert await it.store.durable(await it.put(it.hashes(1, 8)))
        assert it.store.counters["task_failures"] == 1


@pytest.mark.parametrize("name", ["writer", "leases", "uses", "expiry"])
@in_loop
async def test_every_task_of_a_store_is_started_again(tmp_path, name):
    async with Bench(tmp_path) as it:
        assert name in it.store.supervisor.names
        before = it.store.supervisor._tasks[name]
        it.store.supervisor.kill(name)
        await until(lambda: it.store.supervisor._tasks[name] is not before)
        assert it.store.counters["task_failures"] == 1
        assert await it.store.durable(await it.put(it.hashes(1, 4)))


@in_loop
async def test_a_store_whose_writer_is_given_up_says_so_to_every_caller_and_closes(tmp_path):
    it = Bench(tmp_path)
    await it.__aenter__()
    it.store.supervisor._pauses = ()
    await it.put(it.hashes(1, 4))
    it.store.supervisor.kill("writer")
    await asyncio.wait_for(it.store.supervisor.gave_up.wait(), DEADLINE)
    with pytest.raises(Unavailable, match="background task writer failed"):
        it.match(it.hashes(1, 4))
    assert not await it.store.close()


@in_loop
async def test_a_store_closes_while_its_writer_is_started_again(tmp_path):
    it = Bench(tmp_path)
    await it.__aenter__()
    hashes = it.hashes(1, 4)
    it.store.supervisor.kill("writer")
    await it.put(hashes)
    assert await it.store.close()
    async with Bench(tmp_path) as it:
        assert await it.load(hashes) == 4
