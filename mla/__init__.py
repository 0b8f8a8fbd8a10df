"""Absorbed-weight MLA attention, the device pool and the worker. torch lives here only."""

from mla.adapters.transformers import ModelInfo, attach, detach, inspect_model
from mla.cache import LatentCache
from mla.errors import PoolFull, Unsupported
from mla.pool import LatentPool

__all__ = [
    "LatentCache",
    "LatentPool",
    "ModelInfo",
    "PoolFull",
    "Unsupported",
    "attach",
    "detach",
    "inspect_model",
]
