import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kvstore.payloads.kinds import OPEN
from tests.kvstore import blocks


class Victim:
    """A real process that reports on its standard output and dies by SIGKILL."""

    def __init__(self, code: str, *args: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pid = self._process.pid

    def line(self) -> str:
        """The next line that it prints; waits for it."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> list[str]:
        """SIGKILL; returns what it had printed by then."""
        assert self._process.stdout is not None
        os.kill(self.pid, signal.SIGKILL)
        rest = self._process.stdout.read()
        self._process.wait()
        self._process.stdout.close()
        return [line for line in rest.split("\n")[:-1] if line]


@pytest.fixture
def victim() -> Iterator[Callable[..., Victim]]:
    """Starts victims; kills those that the test left alive."""
    started: list[Victim] = []

    def start(code: str, *args: str) -> Victim:
        started.append(Victim(code, *args))
        return started[-1]

    yield start
    for one in started:
        if one._process.poll() is None:
            one.kill()


@pytest.fixture(params=sorted(OPEN))
def payload_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Stores of ``tests.kvstore.blocks`` have payloads of each kind in turn."""
    monkeypatch.setitem(blocks.CHOSEN, "payloads", request.param)
    return str(request.param)
