"""Whether the engines' tests have passed with what they stand on as it is now.

    python -m tests.engines.standing          says so; exit status 1 if they have to be run
    python -m tests.engines.standing test     runs them, and notes in passed.txt what they passed with

The engines are heavy, and most changes do not touch what stands beside them. What does: the adapters and
these tests, every module of ours that either imports, however indirectly, and how the environment is made.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PASSED = Path("tests/engines/passed.txt")
PACKAGES = frozenset({"mla", "kvstore", "server", "tests", "benchmarks"})
BEGINNINGS = ("mla/adapters/*.py", "tests/engines/*.py", "tests/engines/*.txt")
# Parts of files: of all else in these the engines' tests know nothing.
PARTS = {
    "Makefile": re.compile(r"^ENGINES :=.*?(?=^# |\Z)", re.MULTILINE | re.DOTALL),
    "constraints.txt": re.compile(r"^torch==.*$", re.MULTILINE),
    "pyproject.toml": re.compile(r"^dependencies = \[.*?^\]$", re.MULTILINE | re.DOTALL),
}
HEAD = """\
# What the engines' tests last passed with: written by `make test-engines` when all of them pass, to be
# committed. .ci/run runs them when a line here is not what it would be now (tests/engines/standing.py).
"""


def standing(root: Path) -> dict[str, str]:
    """What the tests stand on, each with a hash of its content."""
    found = {str(path.relative_to(root)): path.read_bytes() for path in modules(root)}
    for name, part in PARTS.items():
        found[f"{name} (in part)"] = "\n".join(part.findall((root / name).read_text())).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(found.items())}


def modules(root: Path) -> set[Path]:
    """The files that the tests begin with, and those of our modules that these import."""
    ours = root / PASSED
    waiting = [path for pattern in BEGINNINGS for path in root.glob(pattern) if path != ours]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += imported(root, path) if path.suffix == ".py" else []
    return seen


def imported(root: Path, path: Path) -> Iterator[Path]:
    """Files of our modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] in PACKAGES:
                place = root.joinpath(*parts)
                files = (place.with_suffix(".py"), place / "__init__.py")
                yield from (file for file in files if file.is_file())


def noted(root: Path) -> dict[str, str]:
    """What they passed with; empty if that is not known."""
    if not (root / PASSED).is_file():
        return {}
    lines = (root / PASSED).read_text().splitlines()
    return {name: content for content, _, name in (line.partition("  ") for line in lines if line[:1] != "#")}


def differences(now: Mapping[str, str], passed: Mapping[str, str]) -> list[str]:
    """What is not as it was when they passed."""
    return sorted(name for name in now.keys() | passed.keys() if now.get(name) != passed.get(name))


def decision(root: Path) -> tuple[bool, str]:
    """Whether they have to be run, and why, in words."""
    passed = noted(root)
    if not passed:
        return True, f"the engines' tests are run: there is no {PASSED}"
    changed = differences(standing(root), passed)
    if not changed:
        return False, f"the engines' tests are not run: nothing has changed since they passed ({PASSED})"
    more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
    return True, f"the engines' tests are run: since they passed, {', '.join(changed[:5])}{more} changed"


def test(root: Path) -> int:
    """Run them; if all pass, note with what."""
    missing = [name for name in ("vllm", "sglang") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{', '.join(missing)} cannot be imported here: make test-engines sets up what is needed")
        return 1
    before = standing(root)
    code = subprocess.run([sys.executable, "-m", "pytest", "tests/engines"], cwd=root).returncode
    if code:
        return code
    if changed := differences(standing(root), before):
        print(f"not noted, for {', '.join(changed)} changed meanwhile: run them again")
        return 1
    (root / PASSED).write_text(HEAD + "".join(f"{content}  {name}\n" for name, content in before.items()))
    print(f"noted in {PASSED}: commit it")
    return 0


def main(arguments: list[str]) -> int:
    if arguments == ["test"]:
        return test(ROOT)
    needed, why = decision(ROOT)
    print(why)
    return int(needed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
