"""SIGKILL at random moments of a store-and-load loop: no wrong byte, nothing confirmed is lost."""

import random
import threading
from collections.abc import Callable

import pytest

from kvstore.errors import KVStoreError, Unavailable
from tests.crash.loop import Loop
from tests.server.conftest import DaemonProcess, Fleet, start


class Steps:
    """Counts the ticks of all threads, so that somebody can wait for the n-th."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._count = 0

    def tick(self) -> None:
        with self._news:
            self._count += 1
            self._news.notify_all()

    def wait(self, count: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self._count >= count, 60)


class Crasher:
    """Rounds of: store and load until the daemon dies, start it, look at what is there."""

    def __init__(self, fleet: Fleet, daemon: DaemonProcess, seed: int) -> None:
        self.fleet, self.daemon = fleet, daemon
        self.rng = random.Random(seed)
        self.confirmed: dict[int, int] = {}  # document -> blocks
        self.begun = 0  # documents
        self.delivered = 0
        self.faults: list[BaseException] = []

    def round(self) -> None:
        steps, dead = Steps(), threading.Event()
        before = dict(self.confirmed)

        def until_dead(work: Callable[[Loop], None]) -> None:
            client = self.fleet.connect(self.daemon.url)
            try:
                loop = Loop(client, self.rng.randrange(1 << 30), steps.tick, self._confirm)
                while not dead.is_set():
                    work(loop)
            except Unavailable:
                pass  # the daemon has died
            except BaseException as fault:  # noqa: BLE001 - raised by the test's thread
                # What is under way meets a new daemon, which knows neither its leases nor its tickets.
                if not (dead.is_set() and isinstance(fault, KVStoreError)):
                    self.faults.append(fault)
            finally:
                client.close()

        threads = [threading.Thread(target=until_dead, args=(work,)) for work in (self._store, self._load)]
        for thread in threads:
            thread.start()
        steps.wait(self.rng.randint(1, 300))
        self.daemon.kill()
        dead.set()
        self.daemon.start()
        for thread in threads:
            thread.join()
        assert not self.faults, self.faults
        fresh = [number for number in self.confirmed if before.get(number) != self.confirmed[number]]
        old = self.rng.sample(sorted(before), min(3, len(before)))
        self.verify({*fresh, *old})

    def _confirm(self, number: int, blocks: int) -> None:
        self.confirmed[number] = max(blocks, self.confirmed.get(number, 0))

    def _store(self, loop: Loop) -> None:
        self.begun += 1
        loop.store(self.begun - 1)

    def _load(self, loop: Loop) -> None:
        self.delivered += loop.load(self.rng.randrange(self.begun + 1))

    def verify(self, numbers: set[int]) -> None:
        """All that was confirmed of these documents is there, right after the start."""
        client = self.fleet.connect(self.daemon.url)
        loop = Loop(client, 0, lambda: None, lambda *what: None)
        for number in sorted(numbers):
            assert loop.load(number) >= self.confirmed[number]
        client.close()


@pytest.mark.parametrize("payloads", ["lmdb", "slab"])
@pytest.mark.parametrize(("mode", "kills"), [("mapped", 20), ("tcp-bytes", 10)])
def test_a_killed_daemon_delivers_no_wrong_byte_and_keeps_what_it_confirmed(
    mode: str,
    kills: int,
    payloads: str,
    fleet: Fleet,
    flags: Callable[..., list[str]],
) -> None:
    # The arena is small, so that blocks leave it while others come.
    daemon = start(fleet, mode, flags, host_bytes="1MiB", interval=0, payloads=payloads)
    if mode == "tcp-bytes":  # the same port again and again
        daemon.kill()
        daemon = fleet.daemon(*flags(daemon.url, host_bytes="1MiB", interval=0, payloads=payloads))
    crasher = Crasher(fleet, daemon, seed=kills)
    for _ in range(kills):
        crasher.round()
    assert daemon.term() == 0
    daemon.start()
    crasher.verify(set(crasher.confirmed))
    # The loop has done what it is for.
    assert len(crasher.confirmed) > kills
    assert crasher.delivered > 10 * kills
