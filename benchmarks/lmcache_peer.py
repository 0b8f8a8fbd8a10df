"""LMCache's server on the same blocks. (stub during development)"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


class PeerUnavailable(Exception):
    """The peer cannot be measured here; the message says why."""


class LmcachePeer:
    def __init__(self, place: Path, plan: Any) -> None: ...

    def measure(self, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
        raise PeerUnavailable("not there yet")
