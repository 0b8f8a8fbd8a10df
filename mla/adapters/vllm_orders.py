"""What vLLM's scheduler side tells its workers in each step, and what they tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore.api import Readers
from kvstore.units import UnitKind
from mla.adapters.chains import Chain
from mla.adapters.paged import Place


@dataclass(frozen=True)
class LoadOrder:
    """Load ``hashes[first:]`` into ``places``, each rank into its own; ``readers`` keep together."""

    request: str
    chain: Chain
    hashes: tuple[bytes, ...]
    first: int
    places: tuple[Place, ...]
    readers: Readers | None


@dataclass(frozen=True)
class SaveOrder:
    """Store the blocks behind ``depth`` of a chain, ``parent`` the last one before them."""

    request: str
    chain: Chain
    parent: bytes
    depth: int
    hashes: tuple[bytes, ...]
    places: tuple[Place, ...]
    units: Mapping[int, UnitKind]  # depth in the chain -> kinds


@dataclass
class StepOrders(KVConnectorMetadata):
    """All of one step. ``dropped`` requests were preempted or aborted: nothing of theirs goes on."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)


@dataclass
class StoredDepths(KVConnectorWorkerMetadata):
    """Request -> blocks of its chain that are stored."""

    depths: dict[str, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StoredDepths:
        """Only one rank stores, so two answers hardly name one request."""
        assert isinstance(other, StoredDepths)
        return StoredDepths(self.depths | other.depths)
