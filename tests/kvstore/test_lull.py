"""When writing begins: at a pause, at much that waits, or when somebody waits for the disk."""

from __future__ import annotations

import asyncio

from kvstore.lull import Lull


def run(course):
    async def body():
        came = asyncio.Event()
        return await course(Lull(enough_bytes=100, on_come=came.set), came)

    return asyncio.run(body())


def test_blocks_that_come_put_writing_off_until_they_pause():
    async def course(lull, came):
        lull.note()
        assert not lull.come(10)
        await came.wait()
        assert lull.come(10)

    run(course)


def test_much_that_waits_is_written_beside_what_comes():
    async def course(lull, came):
        lull.note()
        assert lull.come(100)
        assert not lull.come(99)

    run(course)


def test_what_is_no_block_does_not_wait():
    async def course(lull, came):
        lull.note()
        assert lull.come(0)

    run(course)


def test_a_hurry_lasts_until_nothing_waits():
    async def course(lull, came):
        lull.note()
        lull.hurry()
        assert came.is_set()
        assert lull.come(10)
        assert lull.come(10)
        assert lull.come(0)
        assert not lull.come(10)

    run(course)


def test_the_end_puts_nothing_off():
    async def course(lull, came):
        lull.note()
        lull.close()
        assert came.is_set()
        assert lull.come(10)

    run(course)
