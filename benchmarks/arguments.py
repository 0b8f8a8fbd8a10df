"""Command lines of the benchmarks of the store, what they say of the machine, and where they write."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pydantic
from pydantic import ByteSize, TypeAdapter

from benchmarks.options import BenchmarkError
from kvstore.errors import KVStoreError
from kvstore.layout import PRESETS

Value = TypeVar("Value")

_SIZE = TypeAdapter(ByteSize)


class Parser(argparse.ArgumentParser):
    """Options that all of them have; a wrong one is a ``BenchmarkError``."""

    def __init__(self, prog: str, description: str, *, arena: str = "1GiB") -> None:
        super().__init__(prog=prog, description=description)
        add = self.add_argument
        add("--payloads", choices=("lmdb", "slab"), default="lmdb", help="how blocks lie on disk [lmdb]")
        add("--arena", type=size, default=size(arena), help=f"the daemon's memory for blocks [{arena}]")
        add(
            "--data",
            type=Path,
            metavar="DIR",
            default=Path("out"),
            help="where files are made, on the disk to be measured [out]",
        )
        add("--json", type=Path, metavar="FILE", help="write all figures there")

    def add_layout(self) -> None:
        """The layout of the blocks."""
        self.add_argument(
            "--layout", choices=sorted(PRESETS), default="deepseek-v3", help="what a block is [deepseek-v3]"
        )

    def add_plot(self) -> None:
        """Where a picture goes."""
        self.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (PNG) there")

    def error(self, message: str) -> NoReturn:
        raise BenchmarkError(f"{message}; see --help")


def size(text: str) -> int:
    """Bytes of a size such as ``1GiB``."""
    try:
        return int(_SIZE.validate_python(text))
    except pydantic.ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write one such as 1GiB") from None


def at_least(least: int) -> Callable[[str], int]:
    """A whole number that is not smaller."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: write a whole number, {least} or more")
        return int(text)

    return read


def numbers(text: str) -> tuple[int, ...]:
    """Positive whole numbers with commas between."""
    return tuple(at_least(1)(part.strip()) for part in text.split(","))


def run(name: str, benchmark: Callable[[], None]) -> int:
    """The exit status: 2, with one line, on bad input or if the store failed."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the daemon ends too
    try:
        benchmark()
    except (BenchmarkError, KVStoreError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0


def require_vllm() -> None:
    """Raises ``BenchmarkError`` outside the engines' environment."""
    if find_spec("vllm") is None:
        raise BenchmarkError("vllm is not here; use the engines' environment: make .venv-engines/.ready")


@contextmanager
def workplace(parent: Path, need_bytes: int) -> Iterator[Path]:
    """A directory for this run, gone afterwards. Raises ``BenchmarkError`` if it has not that much room."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="bench-", dir=parent.resolve(), ignore_cleanup_errors=True)
    except OSError as error:
        raise BenchmarkError(
            f"--data {parent}: {error.strerror}; name a directory that can be written"
        ) from None
    with made as directory:
        free = shutil.disk_usage(directory).free
        if free < need_bytes:
            raise BenchmarkError(
                f"--data {parent}: {free >> 20} MiB are free, {need_bytes >> 20} needed; measure fewer blocks"
            )
        yield Path(directory)


def machine() -> dict[str, Any]:
    """What the figures were taken on, and when."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures, if a file was named. Raises ``BenchmarkError``."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n")
    except OSError as error:
        raise BenchmarkError(f"{path} cannot be written: {error.strerror}; name another file") from None
