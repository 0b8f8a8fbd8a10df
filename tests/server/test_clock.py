"""A daemon whose wall clock is set: told in its metrics, and nothing else happens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import kvstore
from server.testing import CLOCK
from tests.server.conftest import DEADLINE, ROOT_DIR, document


def test_a_daemons_clock_can_be_set_at_any_time(flags: Callable[..., list[str]]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "server.testing", *flags(ttl_seconds=3600)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT_DIR,
    ) as daemon:
        assert daemon.stdin is not None
        assert daemon.stdout is not None
        url = daemon.stdout.readline().split()[3]
        client = kvstore.connect(url, timeout=DEADLINE)
        doc = document(client, 4)
        doc.store(client)
        for step in (-86400.0, 86400.0):
            daemon.stdin.write(json.dumps({CLOCK: step}) + "\n")
            daemon.stdin.flush()
            assert json.loads(daemon.stdout.readline())["violated"] == []
        while not client.status().counters.get("clock_steps"):  # it looks by itself, each second
            pass
        assert doc.load(client) == 4
        client.close()
        daemon.terminate()
        assert daemon.wait(DEADLINE) == 0
