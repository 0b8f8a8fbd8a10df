"""What a session knows of the request that it serves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.api import Match
from kvstore.units import UnitKind
from mla.storing import StoreJob


@dataclass(slots=True)
class Request:
    """A prompt, what the store has of it, and how far it was handed on."""

    tokens: NDArray[np.uint32]
    hashes: list[bytes]
    usable: list[bytes]  # the most that a hit may be of: some token is always computed
    key: bytes  # namespace digest, or a key of this process while the store is away
    match: Match
    stored_until: int  # tokens of the prompt that may be stored
    units: dict[int, UnitKind]  # depth in blocks -> kinds
    job: StoreJob[int] | None = None
    queued: int = 0  # blocks handed to the job
