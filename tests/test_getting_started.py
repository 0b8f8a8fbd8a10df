"""The getting-started page by itself leads from a clone to a hit: all of its commands, in order."""

from __future__ import annotations

import os
import re
import shutil
import site
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import setuptools

from tests.mla.zoo import save_checkpoint

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "getting-started.md"
CLONED = ("latentkv", "kvstore", "server", "mla", "docs", "pyproject.toml", "README.md", "LICENSE")


def script() -> str:
    """The page's commands, with smaller sizes and a free port."""
    commands = "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for ours, here in {"4GiB": "64MiB", "50GiB": "256MiB", ":9464": f":{port}"}.items():
        assert ours in commands
        commands = commands.replace(ours, here)
    return f"set -euo pipefail\n{commands}"


def environment(home: Path) -> dict[str, str]:
    """What is installed here stands in for a package index; our own package is taken from the clone."""
    shim = home / "shim"
    shim.mkdir()
    # Behind the page's own environment, whose latentkv comes first.
    (shim / "sitecustomize.py").write_text(f"import sys\nsys.path += {site.getsitepackages()!r}\n")
    # Before it, where an old Python brings too old a one.
    (shim / "setuptools").symlink_to(Path(setuptools.__file__).parent)
    return {
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(shim),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it the other way round
        "OMP_NUM_THREADS": "1",
    }


def test_every_command_of_the_page_works_and_the_second_prompt_hits() -> None:
    with tempfile.TemporaryDirectory(prefix="latentkv-") as directory:
        home, clone = Path(directory), Path(directory) / "clone"
        clone.mkdir()
        for name in CLONED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, clone / name)
        save_checkpoint("deepseek_v3", clone / "path/to/checkpoint")
        ran = subprocess.run(
            ["bash", "-c", script()],
            cwd=clone,
            env=environment(home),
            capture_output=True,
            text=True,
            timeout=200,
        )
        log = clone / "serve.log"
        assert ran.returncode == 0, ran.stdout + ran.stderr + (log.read_text() if log.exists() else "")
    assert re.findall(r"^hit (\d+) of 3000 tokens$", ran.stdout, re.MULTILINE) == ["0", str(2999 // 64 * 64)]
    assert f"hit {2600 // 2048 * 2048:,} tokens" in ran.stdout
    assert "2,600 tokens (99.0%) are shared" in ran.stdout
    assert "1 of 1 documents are stored" in ran.stdout
    assert re.search(r"\bok$", ran.stdout, re.MULTILINE)
    assert ran.stdout.endswith("sound\n")
