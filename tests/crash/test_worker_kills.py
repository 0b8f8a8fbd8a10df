"""SIGKILL of workers at random moments: what they held comes back, what they half wrote is never seen."""

import random
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.crash.loop import Loop
from tests.server.conftest import ROOT_DIR, Fleet, start


class WorkerProcess:
    """``tests.crash.loop`` in a process of its own."""

    def __init__(self, url: str, seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.loop", url, str(seed)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT_DIR,
        )

    def kill_after(self, ticks: int) -> dict[int, int]:
        """Kill it behind its n-th tick; blocks of documents that it was told are durable."""
        assert self._process.stdout is not None
        sure: dict[int, int] = {}
        with self._process.stdout as lines:
            for line in lines:
                word, *numbers = line.split()
                if word == "sure":
                    number, blocks = map(int, numbers)
                    sure[number] = max(blocks, sure.get(number, 0))
                ticks -= word == "tick"
                if ticks == 0:
                    self._process.kill()
            self._process.wait()
        return sure


@pytest.mark.parametrize(
    ("mode", "payloads"), [("mapped", "lmdb"), ("mapped", "slab"), ("unix-bytes", "slab")]
)
def test_killed_workers_leave_whole_blocks_and_nothing_held(
    mode: str,
    payloads: str,
    fleet: Fleet,
    flags: Callable[..., list[str]],
) -> None:
    daemon = start(fleet, mode, flags, host_bytes="1MiB", interval=0, lease_seconds=1, payloads=payloads)
    rng = random.Random(mode)
    sure: dict[int, int] = {}
    kills = 4
    # Two at a time, over the same documents.
    for seed in range(kills):
        pair = [WorkerProcess(daemon.url, seed) for _ in range(2)]
        for worker in pair:
            sure |= worker.kill_after(rng.randint(1, 80))
    if mode == "mapped":
        daemon.wait_for("event=worker_gone", count=2 * kills)
    client = fleet.connect(daemon.url)
    loop = Loop(client, 0, lambda: None, lambda *what: None)
    for number, blocks in sure.items():
        assert loop.load(number) >= blocks
    # Every document can be stored and loaded whole, so no slot and no block is stuck.
    for number in (1000 * seed + i for seed in range(kills) for i in range(3)):
        loop.store(number)
        assert loop.load(number) == len(loop.hashes(number))
    if mode == "mapped":
        assert client.status().leases == 0
