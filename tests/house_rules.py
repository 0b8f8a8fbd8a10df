"""Rules of the house that no linter has: module and function length, where broad excepts may stand.

Run as ``python -m tests.house_rules``; prints each violation and exits 1 if there is one.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("latentkv", "kvstore", "server", "mla", "benchmarks")
MODULE_LINES = 400
FUNCTION_LINES = 60


def violations(path: Path) -> Iterator[str]:
    text = path.read_text()
    name = path.relative_to(ROOT)
    if (lines := text.count("\n")) > MODULE_LINES:
        yield f"{name}: {lines} lines, at most {MODULE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
        ):
            yield f"{name}:{node.lineno}: {node.func.id}; name the attribute, or ask the type"


def main() -> int:
    modules = [
        path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "kvstore/v1" not in str(path)
    ]
    found = [fault for path in modules for fault in violations(path)]
    print("\n".join(found) or f"{len(modules)} modules keep the house rules")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
