"""A real daemon in a process of its own, to be killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.options import BenchmarkError

_STOP_SECONDS = 120.0  # draining may have to write gigabytes
_READY = "latentkv: serving on "


class Daemon:
    """``python -m server serve``, or another program, on one data directory, reached by a unix socket.

    ``pid`` and ``ended_by`` are what the kernel says of the process, so they tell whether
    it really was another one. Use it as a context: its end kills the process.
    """

    def __init__(
        self, data: Path, flags: Sequence[str] = (), program: Sequence[str] = ("server", "serve")
    ) -> None:
        # Of its own, since the path of a socket must be short.
        self._sockets = tempfile.TemporaryDirectory(prefix="latentkv-")
        self.url = f"unix://{self._sockets.name}/kv.sock"
        self.data = data
        self._log = data.with_name(data.name + ".log")
        self._command = [
            *(sys.executable, "-m", *program),
            *("--data", str(data), "--listen", self.url, "--log-level", "warning"),
            *flags,
        ]
        self.ended_by: int | None = (
            None  # status of the last process that ended: minus the signal, or its code
        )
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._end(signal.SIGKILL)
        self._sockets.cleanup()

    @property
    def pid(self) -> int:
        """Process id of the daemon that runs, or ran last."""
        return self._process.pid

    def stop(self, *, kill: bool) -> None:
        """End the process: by SIGKILL, or by SIGTERM and its own clean drain."""
        self._end(signal.SIGKILL if kill else signal.SIGTERM)

    def start(self) -> None:
        """Start it again on the same data. Raises ``BenchmarkError`` if it does not come up."""
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(),
            )
        assert self._process.stdout is not None
        # The line comes when requests are answered; an empty one when the process has ended.
        self.banner = self._process.stdout.readline().strip()
        if not self.banner.startswith(_READY):
            self._end(signal.SIGKILL)
            raise BenchmarkError(f"the daemon did not start: {self.last_words()}")

    def _end(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        try:
            self.ended_by = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.ended_by = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def last_words(self) -> str:
        """The end of its log."""
        lines = self._log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else f"it ended with status {self.ended_by}"


def _environment() -> dict[str, str]:
    """Ours, with compiled modules kept for the next start: those of an installed package are."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
