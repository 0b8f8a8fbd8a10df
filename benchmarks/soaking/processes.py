"""The processes of a soak: a daemon over a disk that fails on demand, and workers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.daemon import Daemon
from benchmarks.options import BenchmarkError

ANSWER_SECONDS = 60.0  # a daemon that has not answered by then is stuck
Event = dict[str, Any]


class FaultyDaemon(Daemon):
    """``python -m server.testing``: a daemon whose disk fails as it is told."""

    def __init__(self, data: Path, flags: Sequence[str]) -> None:
        super().__init__(data, flags, ("server.testing",))

    @property
    def page(self) -> str:
        """The address of its HTTP port, as it says itself."""
        return self.banner.partition(", http ")[2].partition(",")[0]

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    @property
    def died_of(self) -> int | None:
        """Its status, if it ended by itself: minus a signal, or a code."""
        return self._process.poll()

    def tell(self, **switches: object) -> Event:
        """Set switches; what it holds, and which invariants are violated. Raises ``BenchmarkError``."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(switches) + "\n")
            stdin.flush()
            ready, _, _ = select.select([stdout], [], [], ANSWER_SECONDS)
            line = stdout.readline() if ready else ""
        except OSError as error:
            raise BenchmarkError(f"the daemon has died: {error}") from error
        if not line:
            raise BenchmarkError(f"the daemon has died, or gives no answer within {ANSWER_SECONDS:g} s")
        answer: Event = json.loads(line)
        if "unknown" in answer:
            raise BenchmarkError(f"server.testing has no switch {', '.join(answer['unknown'])}")
        return answer

    def limit_files(self, nbytes: int | None) -> None:
        """Let no file of it grow beyond so many bytes."""
        soft = resource.RLIM_INFINITY if nbytes is None else nbytes
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))

    def open_files(self) -> int:
        """Descriptors that it has, beside those of its data."""
        found = 0
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found += not os.readlink(entry).startswith(str(self.data))
        return found


class WorkerProcess:
    """``benchmarks.soaking.worker``; what it tells goes to ``hear``, in a thread."""

    def __init__(
        self, url: str, seed: int, hear: Callable[[WorkerProcess, Event], None], token_file: str = ""
    ) -> None:
        self.seed = seed
        self.stopped: list[tuple[float, float]] = []  # when it was under SIGSTOP, monotonic seconds
        self._hear = hear
        self._news = threading.Condition()
        self._heard: set[str] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soaking.worker", url, str(seed), token_file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"GRPC_VERBOSITY": "ERROR"},  # else it has something to say of each fork
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                break  # it was killed in the midst of it
            event = json.loads(line)
            self._hear(self, event)
            with self._news:
                self._heard.add(event["event"])
                self._news.notify_all()
        with self._news:
            self._heard.add("gone")
            self._news.notify_all()

    def order(self, do: str, seconds: float = 0.0) -> None:
        """Tell it what to do. One that is dead hears nothing."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, "seconds": seconds}) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass

    def heard(self, event: str, seconds: float) -> bool:
        """Wait until it has told this, and forget it; False if it does not."""
        with self._news:
            found = self._news.wait_for(lambda: {event, "gone"} & self._heard, seconds)
            told = bool(found) and event in self._heard
            self._heard.discard(event)
            return told

    def stop(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)
        self.stopped.append((time.monotonic(), float("inf")))

    def go_on(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)
        began, _ = self.stopped.pop()
        self.stopped.append((began, time.monotonic()))

    def stopped_seconds(self, began: float, ended: float) -> float:
        """For how much of a time it was stopped."""
        return sum(max(0.0, min(ended, last) - max(began, first)) for first, last in self.stopped)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()
        self._listener.join(ANSWER_SECONDS)

    def forget(self) -> None:
        """SIGKILL; and children that it has left see by the end of its orders that they shall end, too."""
        self.kill()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # an order that it did not live to hear
            self._process.stdin.close()

    def end(self) -> bool:
        """Let it close what it has and end; False if it had to be killed."""
        self.order("end")
        ended = self.heard("ended", ANSWER_SECONDS)
        if not ended:
            self._process.kill()
        self._process.wait()
        return ended
