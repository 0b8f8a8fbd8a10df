"""Tickets: bits that are remembered fairly, under numbers that tell nothing."""

import asyncio
import itertools

import pytest

from kvstore.errors import TicketUnknown
from kvstore.namespace import Namespace
from kvstore.tickets import TicketDesk
from tests.kvstore.blocks import SMALL, in_loop, put
from tests.kvstore.test_writeback import Bench, settled_ticket

MINE, THEIRS = 1, 2


@in_loop
async def test_empty_commits_take_no_memory_and_push_out_nobodys_ticket(tmp_path):
    async with Bench(tmp_path) as it:
        ticket = await it.put(it.hashes(1, 4))
        assert await it.store.durable(ticket)
        theirs = await it.store.open_namespace(Namespace(layout=SMALL, tenant="other"))
        lease = it.store.reserve(it.other, theirs, b"\0" * 32, [], 0).lease
        empty = {it.store.commit(it.other, lease, [], []) for _ in range(70_000)}
        assert len(it.store._writer.tickets) == 1
        assert await it.store.durable(ticket)
        for number in empty:
            assert await it.store.durable(number)
            assert it.store.tenant_of_ticket(number) == "other"


@in_loop
async def test_who_commits_most_loses_the_oldest():
    desk = TicketDesk(remembered=64)
    mine = [settled_ticket(desk, MINE) for _ in range(20)]
    theirs = [settled_ticket(desk, THEIRS) for _ in range(1000)]
    assert [await desk.wait(ticket) for ticket in mine] == [True] * 20
    assert [await desk.wait(ticket) for ticket in theirs[-44:]] == [True] * 44
    with pytest.raises(TicketUnknown):
        await desk.wait(theirs[-45])
    assert len(desk) == 64


@in_loop
async def test_a_tenants_namespaces_share_what_it_may_have():
    desk = TicketDesk(share=lambda namespace: namespace == MINE, remembered=64)
    mine = [settled_ticket(desk, MINE) for _ in range(20)]
    for namespace in range(100, 1100):
        settled_ticket(desk, namespace)
    assert [await desk.wait(ticket) for ticket in mine] == [True] * 20


@in_loop
async def test_tickets_that_wait_are_bounded_too_and_who_waits_for_one_that_goes_is_told():
    desk = TicketDesk(remembered=64)
    first = desk.give([5, 6], THEIRS)
    waiting = asyncio.ensure_future(desk.wait(first))
    await asyncio.sleep(0)
    others = [desk.give([6], THEIRS) for _ in range(500)]
    assert not await waiting
    assert len(desk._waiting[6]) == 64
    assert 5 not in desk._waiting
    desk.settle(6, durable=True)
    assert await desk.wait(others[-1])
    assert not desk._waiting


@in_loop
async def test_the_numbers_follow_no_order_and_repeat_in_no_run():
    desks = [TicketDesk() for _ in range(2)]
    numbers = [[desk.give([1], 7) for _ in range(200)] for desk in desks]
    for mine in numbers:
        assert len(set(mine)) == 200
        assert all(0 < number < 1 << 63 for number in mine)
        steps = {later - sooner for sooner, later in itertools.pairwise(mine)}
        assert len(steps) > 190
        assert 60 < sum(later > sooner for sooner, later in itertools.pairwise(mine)) < 140
    assert not set(numbers[0]) & set(numbers[1])


@in_loop
async def test_a_namespace_that_is_gone_leaves_no_number_behind():
    desk = TicketDesk()
    number = desk.give([], 7)
    assert desk.give([], 7) == number
    assert await desk.wait(number)
    desk.close_namespace(7)
    with pytest.raises(TicketUnknown):
        await desk.wait(number)
    desk.close_namespace(7)


@in_loop
async def test_a_ticket_says_the_same_however_often_it_is_asked(tmp_path):
    async with Bench(tmp_path) as it:
        it.faults.fail_writes = True
        ticket = await put(it.store, it.worker, it.namespace, it.hashes(1, 4))
        assert not await it.store.durable(ticket)
        assert not await it.store.durable(ticket)
        it.faults.fail_writes = False
