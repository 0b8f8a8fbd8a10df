"""Request traces: JSON lines, plain or compressed with zstd.

Each line is a request: ``timestamp`` (ms), ``input_length`` (tokens) and ``hash_ids``, one
for each full or partial block of the input, where equal ids mean an equal prefix up to
there. A first line ``{"block_tokens": n}`` gives the tokens of a block; without it they
are 512, as in Mooncake's traces.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import zstandard

from kvstore.errors import InvalidArgument
from kvstore.layout import BLOCK_TOKENS

MOONCAKE_BLOCK_TOKENS = 512
_MAGIC = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt; ``at`` in seconds since the trace's start."""

    at: float
    tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival, at least one with a block."""

    block_tokens: int
    requests: list[Request]

    @property
    def distinct_blocks(self) -> int:
        """Blocks that an endless cache would hold."""
        return len({block for request in self.requests for block in request.blocks})

    @property
    def seconds(self) -> float:
        """From the first to the last request."""
        return self.requests[-1].at - self.requests[0].at


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises ``InvalidArgument`` naming the line, and ``OSError``."""
    with path.open("rb") as file:
        packed = file.read(len(_MAGIC)) == _MAGIC
        file.seek(0)
        raw = zstandard.ZstdDecompressor().stream_reader(file) if packed else file
        try:
            return parse(io.TextIOWrapper(raw, encoding="utf-8"), str(path))
        except (zstandard.ZstdError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{path} is no trace: {error}") from None


def parse(lines: Iterable[str], name: str) -> Trace:
    """A trace from its lines. Raises ``InvalidArgument``."""
    block_tokens, requests = MOONCAKE_BLOCK_TOKENS, []
    for number, line in enumerate(lines, 1):
        try:
            raw = json.loads(line)
            if number == 1 and "hash_ids" not in raw:
                block_tokens = int(raw["block_tokens"])
                continue
            requests.append(_request(raw))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"{name}, line {number}: no request of a trace ({error!r})") from None
    if block_tokens <= 0 or not any(request.blocks for request in requests):
        raise InvalidArgument(f"{name}: a trace needs a positive block_tokens and a request with blocks")
    return Trace(block_tokens, sorted(requests, key=lambda request: request.at))


def recorded_trace(requests: Iterable[tuple[float, int, bytes]]) -> Trace:
    """A trace from a daemon's record: unix seconds, tokens, 8 bytes a block. Raises ``InvalidArgument``."""
    found = [Request(at, tokens, tuple(np.frombuffer(ids, "<i8").tolist())) for at, tokens, ids in requests]
    if not any(request.blocks for request in found):
        raise InvalidArgument("the daemon has recorded no request of a block or more; see record_bytes")
    first = found[0].at
    return Trace(BLOCK_TOKENS, [replace(request, at=request.at - first) for request in found])


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace that ``read_trace`` reads. Raises ``OSError``."""
    with path.open("w") as file:
        file.write(json.dumps({"block_tokens": trace.block_tokens}) + "\n")
        for each in trace.requests:
            line = {
                "timestamp": round(each.at * 1000),
                "input_length": each.tokens,
                "hash_ids": list(each.blocks),
            }
            file.write(json.dumps(line) + "\n")


def _request(raw: dict[str, object]) -> Request:
    ids, at, tokens = raw["hash_ids"], raw["timestamp"], raw["input_length"]
    if not isinstance(ids, list) or not isinstance(at, int | float) or not isinstance(tokens, int):
        raise TypeError("hash_ids must be a list, timestamp a number, input_length a whole number")
    return Request(at / 1000, tokens, tuple(map(int, ids)))
