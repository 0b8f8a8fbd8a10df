"""An event loop in a thread of its own, which other threads call into."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.forking import Home

Result = TypeVar("Result")

CALL_SECONDS = 30.0  # bound of the calls that wait for nothing but the loop


class LoopThread:
    """The loop, its thread, and the way in. Thread-safe; of no use in a forked child, which says so."""

    def __init__(self) -> None:
        self._home = Home()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="latentkv-loop", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()  # a call enters the loop before it is closed, or not at all
        self._closed = False

    @property
    def here(self) -> bool:
        """Whether the thread is one of this process."""
        return self._home.here

    def require_home(self) -> None:
        """Raises ``Forked`` in a child."""
        self._home.require("store", "open a store of its own or connect to a daemon")

    def run(self, work: Coroutine[Any, Any, Result], timeout: float | None = CALL_SECONDS) -> Result:
        """What ``work`` comes to in the loop. Raises what it raises, and ``Unavailable``."""
        try:
            self.require_home()
            future = self._enter(work)
        except Unavailable:
            work.close()
            raise
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise DeadlineExceeded(f"the store did not answer within {timeout} s") from None
        except concurrent.futures.CancelledError:
            raise Unavailable("this store was closed during the call; open it again") from None

    def _enter(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        with self._lock:
            if self._closed:
                raise Unavailable("this store is closed; open it again")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Callable[[], Result]) -> Result:
        """What ``work`` returns, called in the loop. Raises what ``run`` does."""

        async def call() -> Result:
            return work()

        return self.run(call())

    def close(self, last: Coroutine[Any, Any, object] | None = None) -> None:
        """Take no more calls, run ``last``, end those that still wait, and the thread. Once only."""
        with self._lock:
            self._closed = True
        try:
            if last is not None:
                asyncio.run_coroutine_threadsafe(last, self._loop).result()
        finally:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_others() -> None:
    """End the calls that still wait, so that their callers learn of the end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
