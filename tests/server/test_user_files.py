"""A user's files with the names of our packages change no command, wherever they lie."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from latentkv.__main__ import OURS, ROOT, command
from tests.server.conftest import DEADLINE, ROOT_DIR

NAMES = ("server.py", "kvstore.py", "mla/__init__.py")


@pytest.fixture
def user() -> Iterator[Path]:
    """A user's directory, in which our packages' names stand for something else; with a short path."""
    with TemporaryDirectory(prefix="latentkv-") as name:
        for file in NAMES:
            path = Path(name) / file
            path.parent.mkdir(exist_ok=True)
            path.write_text("raise SystemExit('this is the user\\'s own')\n")
        yield Path(name)


def script(directory: Path) -> str:
    """The ``latentkv`` of an installation, as pip writes it."""
    entry = tomllib.loads((ROOT_DIR / "pyproject.toml").read_text())["project"]["scripts"]["latentkv"]
    module, function = entry.split(":")
    path = directory / "bin" / "latentkv"
    path.parent.mkdir()
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def ran(user: Path, *words: str, on_path: bool, code: int = 0) -> str:
    environment = dict(os.environ)
    if on_path:
        environment["PYTHONPATH"] = str(user)
    done = subprocess.run(
        words, cwd=user, env=environment, capture_output=True, text=True, timeout=2 * DEADLINE
    )
    assert done.returncode == code, done.stderr
    return done.stdout if not code else done.stderr


@pytest.mark.parametrize("on_path", [False, True], ids=["current directory", "PYTHONPATH"])
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--version"], 0, "latentkv "),
        (["config", "show", "--data", "/d"], 0, "from --data"),
        (["status", "--listen", "unix:///nowhere/kv.sock"], 3, "no daemon answers"),
        (["check", "/nowhere"], 2, "holds no store"),
        (
            ["warm", ".", "--model", "tiny", "--listen", "unix:///nowhere/kv.sock"],
            3,
            "through a running daemon",
        ),
    ],
)
def test_a_command_is_ours(
    words: list[str], code: int, said: str, on_path: bool, user: Path, tmp_path: Path
) -> None:
    assert said in ran(user, script(tmp_path), *words, on_path=on_path, code=code)


@pytest.mark.parametrize("on_path", [False, True], ids=["current directory", "PYTHONPATH"])
def test_bench_starts_a_daemon_of_ours(on_path: bool, user: Path, tmp_path: Path) -> None:
    words = ["bench", str(tmp_path), "--size", "2MiB", "--model", "tiny"]
    environment = dict(os.environ) | ({"PYTHONPATH": str(user)} if on_path else {})
    done = subprocess.run(
        [script(tmp_path), *words],
        cwd=user,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    if "no O_DIRECT there" in done.stderr:
        pytest.skip("needs a disk that can be read past the page cache")
    assert done.returncode == 0, done.stderr
    assert "load from DISK" in done.stdout


@pytest.mark.parametrize("on_path", [False, True], ids=["current directory", "PYTHONPATH"])
def test_a_daemon_of_ours_serves(on_path: bool, user: Path) -> None:
    environment = dict(os.environ) | ({"PYTHONPATH": str(user)} if on_path else {})
    flags = ["--data", "data", "--listen", f"unix://{user}/kv.sock", "--host-bytes", "16MiB"]
    with subprocess.Popen(
        command("serve", *flags), cwd=user, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("latentkv: serving on ")
            process.terminate()
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()


def test_python_finds_the_command_by_the_packages_name(tmp_path: Path) -> None:
    assert ran(tmp_path, sys.executable, "-m", "latentkv", "--version", on_path=False).startswith("latentkv ")


def test_all_of_our_packages_are_found_beside_the_entry() -> None:
    assert all((ROOT / name / "__init__.py").is_file() for name in OURS)
    scripts = tomllib.loads((ROOT_DIR / "pyproject.toml").read_text())
    installed = scripts["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.rstrip("*") for name in installed} == OURS
