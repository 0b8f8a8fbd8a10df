"""What a run of ``disk_vs_prefill`` was asked to do, and the one-line error it ends with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kvstore.layout import BLOCK_TOKENS

DEFAULT_TOKENS = "2048,8192,32768"
DEMO_TOKENS = "2048,8192,16384"


class BenchmarkError(Exception):
    """The benchmark cannot go on; the message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """``tokens``: lengths in rising order. ``data``: where the daemon's directory is made."""

    tokens: tuple[int, ...]
    model: Path | None
    document: Path | None
    data: Path
    exact: bool
    sigkill: bool
    chunk: int  # tokens of a prefill chunk of the session: C of exact mode
    repeats: int
    host_bytes: str | None
    device: str | None
    json: Path | None
    plot: Path | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BenchmarkError(f"{message}; see --help")


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options from the command line. Raises ``BenchmarkError``."""
    given = _parser().parse_args(arguments)
    least = given.chunk if given.exact or given.demo else BLOCK_TOKENS
    return Options(
        tokens=_lengths(given.tokens or (DEMO_TOKENS if given.demo else DEFAULT_TOKENS), least),
        model=given.model,
        document=given.document,
        data=given.data,
        exact=given.exact or given.demo,
        sigkill=given.demo,
        chunk=_chunk(given.chunk),
        repeats=_at_least("--repeats", given.repeats, 1),
        host_bytes=given.host_bytes,
        device=given.device,
        json=given.json,
        plot=given.plot,
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="disk_vs_prefill",
        description="Time to the first token of a document that is prefilled again, or loaded from a cache"
        " on disk, in host memory or on the device.",
    )
    add = parser.add_argument
    add("--tokens", metavar="N,N", help=f"lengths of the document [{DEFAULT_TOKENS}]")
    add(
        "--model",
        type=Path,
        metavar="DIR",
        help="a Hugging Face checkpoint of an MLA model, or deepseek-v2-lite: random weights at its size"
        " [built-in tiny]",
    )
    add("--document", type=Path, metavar="FILE", help="text to read [Python's own reference texts]")
    add(
        "--data",
        type=Path,
        metavar="DIR",
        default=Path("out"),
        help="where the store is made for the run [out]",
    )
    add("--exact", action="store_true", help="exact mode: answers must be identical to the bit")
    add("--demo", action="store_true", help=f"exact mode, SIGKILL for the daemon, lengths {DEMO_TOKENS}")
    add("--chunk", type=int, metavar="N", default=512, help="tokens of a prefill chunk of the session [512]")
    add("--repeats", type=int, metavar="N", default=2, help="runs of each way, of which the best counts [2]")
    add("--host-bytes", metavar="SIZE", help="the daemon's memory tier, such as 1GiB [its default]")
    add("--device", help="torch device of the model [cuda if there is one, else cpu]")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--plot", type=Path, metavar="FILE", help="write a picture (PNG) there")
    return parser


def _lengths(text: str, least: int) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise BenchmarkError(f"--tokens {text!r}: write whole numbers with commas between, such as 2048,8192")
    lengths = tuple(sorted({int(part) for part in parts}))
    if lengths[0] <= least:
        raise BenchmarkError(
            f"--tokens {text!r}: of {lengths[0]} tokens nothing can be hit, for hits end at"
            f" multiples of {least}; write {least + 1} or more"
        )
    return lengths


def _chunk(chunk: int) -> int:
    if chunk < BLOCK_TOKENS or chunk % BLOCK_TOKENS:
        raise BenchmarkError(f"--chunk {chunk}: write a positive multiple of {BLOCK_TOKENS}")
    return chunk


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise BenchmarkError(f"{name} {value}: write {least} or more")
    return value
