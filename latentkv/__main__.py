"""The ``latentkv`` command, by ``latentkv`` or ``python -m latentkv``.

Our packages have plain names, and a user's ``server.py``, ``kvstore.py`` or ``mla/`` in the current
directory or on PYTHONPATH would come before them. So they are found beside this file, wherever the
search path leads. ``command`` starts another such process, which looks in no current directory at all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
OURS = frozenset({"latentkv", "kvstore", "server", "mla"})


class OurPackages:
    """Finds our packages where this one lies."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``."""
        return PathFinder.find_spec(name, [str(ROOT)], target) if name in OURS else None


def command(*arguments: str) -> list[str]:
    """How a process of ours starts ``latentkv`` with these arguments."""
    return [sys.executable, "-P", str(Path(__file__).resolve()), *arguments]


def main() -> None:
    """Entry point of the ``latentkv`` command."""
    sys.meta_path.insert(0, OurPackages)
    try:
        from server.standard import prepare

        prepare(sys.argv[1:])
        from server.cli import main as run
    except KeyboardInterrupt:  # Ctrl-C while modules are loaded: there is nothing to undo
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
