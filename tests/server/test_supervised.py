"""A daemon whose background tasks die: it says so, goes on, or ends so that somebody starts it anew."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

import kvstore
from kvstore.namespace import Namespace
from tests.server.conftest import DEADLINE, ROOT_DIR, SMALL

TASKS = ["writer", "leases", "uses", "expiry", "workers", "history", "web", "handover"]


class Mortal:
    """A daemon whose tasks can be killed by name."""

    def __init__(self, path):
        flags = ["--data", str(path / "data"), "--listen", f"unix://{path}/kv.sock"]
        flags += ["--http", "127.0.0.1:0", "--host-bytes", "4MiB"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server.testing", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT_DIR,
            env=dict(os.environ),
        )
        ready = self.process.stdout.readline()
        self.url = ready.split()[3]
        self.http = ready.split("http ")[1].split(",")[0]

    def kill(self, name):
        """Kill a task; what is held and violated then, or None if the daemon has ended."""
        try:
            self.process.stdin.write(json.dumps({"kill_task": name}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def page(self, path):
        try:
            with urllib.request.urlopen(self.http + path, timeout=DEADLINE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def failures(self):
        text = self.page("metrics")[1]
        (line,) = [line for line in text.splitlines() if line.startswith("latentkv_task_failures_total")]
        return float(line.split()[1])


@pytest.fixture
def mortal(tmp_path):
    daemon = Mortal(tmp_path)
    yield daemon
    if daemon.process.poll() is None:
        daemon.process.terminate()
        daemon.process.communicate(timeout=DEADLINE)


def test_every_background_task_of_a_daemon_may_die_and_it_serves_on(mortal):
    with contextlib.closing(kvstore.connect(mortal.url)) as client:
        for count, name in enumerate(TASKS, 1):
            assert mortal.kill(name)["violated"] == []
            assert mortal.failures() == count
            assert client.open_namespace(Namespace(layout=SMALL))
        while mortal.page("readyz") != (200, "ok\n"):
            pass
        assert client.status().mode == "ok"
    mortal.process.terminate()
    _, log = mortal.process.communicate(timeout=DEADLINE)
    assert mortal.process.returncode == 0
    for name in TASKS:
        assert f"event=task_failed task={name} failures=1" in log


def test_a_daemon_whose_writer_dies_again_and_again_ends_and_says_why(mortal):
    while mortal.kill("writer") is not None:
        pass
    _, log = mortal.process.communicate(timeout=DEADLINE)
    assert mortal.process.returncode not in (0, None)
    assert "event=task_given_up task=writer" in log
    assert "event=ending_unready" in log
    assert log.splitlines()[-1].startswith("latentkv: ended, for the background task writer failed 5 times")
