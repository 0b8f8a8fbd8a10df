"""Absorbed-weight MLA attention, the device pool and the worker. torch lives here only."""

from mla.adapters.transformers import ModelInfo, attach, detach, inspect_model
from mla.cache import LatentCache
from mla.errors import PoolFull, Unsupported
from mla.pool import LatentPool
from mla.session import Session
from mla.usage import Generation, Prefilled, Usage

__all__ = [
    "Generation",
    "LatentCache",
    "LatentPool",
    "ModelInfo",
    "PoolFull",
    "Prefilled",
    "Session",
    "Unsupported",
    "Usage",
    "attach",
    "detach",
    "inspect_model",
]
