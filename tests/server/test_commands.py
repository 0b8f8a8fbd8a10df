"""Commands beside ``serve``: their answers, their JSON, and how they fail."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.server.conftest import DEADLINE, ROOT_DIR


def latentkv(*arguments: str, code: int = 0) -> str:
    """Run a command; its output, or its one line on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "server", *arguments],
        cwd=ROOT_DIR,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == code, done.stderr
    if not code:
        return done.stdout
    assert done.stderr.startswith("latentkv: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_config_show_says_each_value_and_where_it_comes_from() -> None:
    flags = ("config", "show", "--data", "/d", "--listen", "127.0.0.1:5000", "--host-bytes", "1GiB")
    shown = json.loads(latentkv(*flags, "--json"))
    assert shown["host_bytes"] == {"value": 1 << 30, "source": "from --host-bytes"}
    assert shown["listen"] == {"value": "127.0.0.1:5000", "source": "from --listen"}
    assert shown["codec"] == {"value": "raw", "source": "by default"}
    assert "from --host-bytes" in latentkv(*flags)


def test_config_show_refuses_what_serve_refuses() -> None:
    assert "policy='lru' (from --policy)" in latentkv(
        "config", "show", "--data", "/d", "--policy", "lru", code=2
    )
