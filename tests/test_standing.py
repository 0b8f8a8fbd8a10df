"""When the engines' tests are to be run again: what they stand on is known, and nothing else counts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.engines.standing import HEAD, PARTS, PASSED, ROOT, decision, differences, modules, noted, standing

NOW = standing(ROOT)
ELSEWHERE = ("server/commands/plan.py", "tests/kvstore/test_arena.py", "benchmarks/soak.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of this tree in which the engines' tests have passed."""
    shared = [ROOT / name for name in (*PARTS, *ELSEWHERE)]
    for path in (*modules(ROOT), *shared):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    lines = "".join(f"{content}  {name}\n" for name, content in NOW.items())
    (tmp_path / PASSED).write_text(HEAD + lines)
    return tmp_path


def test_nothing_is_run_while_nothing_has_changed(tree: Path) -> None:
    assert noted(tree) == standing(tree)
    assert decision(tree)[0] is False


def test_they_are_run_where_no_run_is_noted(tree: Path) -> None:
    (tree / PASSED).unlink()
    assert decision(tree) == (True, f"the engines' tests are run: there is no {PASSED}")


@pytest.mark.parametrize(
    "file",
    [
        "mla/adapters/vllm.py",
        "mla/storing.py",  # by way of an adapter
        "kvstore/wire.py",  # by way of the client
        "tests/engines/test_vllm.py",
        "tests/engines/requirements.txt",
        "tests/server/conftest.py",
    ],
)
def test_they_are_run_when_what_they_stand_on_changes(file: str, tree: Path) -> None:
    with (tree / file).open("a") as changed:
        changed.write("\n# another line\n")
    needed, why = decision(tree)
    assert needed
    assert why.endswith(f"since they passed, {file} changed")
    (tree / file).unlink()
    assert file in differences(standing(tree), noted(tree))


def test_they_are_run_when_a_module_comes_to_what_they_stand_on(tree: Path) -> None:
    (tree / "mla" / "adapters" / "another.py").touch()
    assert decision(tree)[1].endswith("mla/adapters/another.py changed")


@pytest.mark.parametrize(
    ("file", "old", "new", "needed"),
    [
        ("Makefile", "MINUTES ?= 2", "MINUTES ?= 3", False),
        ("Makefile", "tests/engines/engines.txt", "tests/engines/other.txt", True),
        ("constraints.txt", "torch==", "torch==0", True),
        ("constraints.txt", "pytest==", "pytest==0", False),
        ("pyproject.toml", '"numpy>=', '"numpy>=0', True),
        ("pyproject.toml", "line-length = 110", "line-length = 111", False),
    ],
)
def test_of_shared_files_only_their_part_counts(
    file: str, old: str, new: str, needed: bool, tree: Path
) -> None:
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new, 1))
    assert decision(tree)[0] is needed


def test_what_they_do_not_stand_on_changes_nothing(tree: Path) -> None:
    known = {str(path.relative_to(tree)) for path in modules(tree)}
    for file in ELSEWHERE:
        assert file not in known
        (tree / file).write_text("")
    assert decision(tree)[0] is False


def test_the_ci_script_asks_and_the_make_target_notes() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "if ! .venv/bin/python -m tests.engines.standing; then\n  make test-engines\nfi" in script
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"]).returncode == 0
    assert "\t$(ENGINES)/bin/python -m tests.engines.standing test\n" in (ROOT / "Makefile").read_text()
