"""Settings of a store, checked once and frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvstore.errors import InvalidArgument
from kvstore.units import DEFAULT_INTERVAL, check_interval

GIB = 1 << 30
MIB = 1 << 20

Policy = Literal["unit", "block"]
Admit = Literal["always", "second"]
CodecName = Literal["raw", "zstd"]
PayloadKind = Literal["lmdb", "slab"]


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What a store may use and how it behaves. Sizes in bytes, times in seconds.

    Raises ``InvalidArgument`` naming the setting and its value.
    """

    data: Path
    host_bytes: int = 4 * GIB
    disk_bytes: int = 50 * GIB
    interval: int = DEFAULT_INTERVAL  # tokens between interval units; 0 is off
    policy: Policy = "unit"
    tenant_bytes: int = 0  # of disk that one tenant may fill; 0 is all of it
    tenant_quotas: Mapping[str, int] = field(default_factory=dict)  # the same for those named here
    tenant_namespaces: int = 4096  # that one tenant, or one caller, may have open
    tenant_block_sizes: int = 8  # and of how many sizes of blocks
    admit: Admit = "always"  # what goes to disk: all blocks, or those that were seen before
    codec: CodecName = "raw"
    payloads: PayloadKind = "lmdb"
    ghost_bytes: int = 64 * MIB  # RAM for chains that were seen and are not stored
    ttl_seconds: float = 86400.0  # life of a block since its last use; 0 is for ever
    max_age_seconds: float = 0.0  # and since it was stored
    pin_share: float = 0.5  # of the disk, that pins may keep
    lease_seconds: float = 60.0
    drain_seconds: float = 30.0  # how long closing may take to make blocks durable
    readers: int = 8  # threads that read payloads
    numa_node: int | None = None  # where the arena's memory comes from; None is anywhere

    def __post_init__(self) -> None:
        check_interval(self.interval)
        if self.policy not in ("unit", "block"):
            raise InvalidArgument(f"policy={self.policy!r}: use 'unit' or 'block'")
        if self.admit not in ("always", "second"):
            raise InvalidArgument(f"admit={self.admit!r}: use 'always' or 'second'")
        if self.codec not in ("raw", "zstd"):
            raise InvalidArgument(f"codec={self.codec!r}: use 'raw' or 'zstd'")
        if self.payloads not in ("lmdb", "slab"):
            raise InvalidArgument(f"payloads={self.payloads!r}: use 'lmdb' or 'slab'")
        for name, value, least in (
            ("host_bytes", self.host_bytes, MIB),
            ("disk_bytes", self.disk_bytes, 16 * MIB),
            ("ghost_bytes", self.ghost_bytes, 0),
            ("readers", self.readers, 1),
            ("tenant_namespaces", self.tenant_namespaces, 1),
            ("tenant_block_sizes", self.tenant_block_sizes, 1),
            ("numa_node", self.numa_node or 0, 0),
        ):
            if value < least:
                raise InvalidArgument(f"{name}={value} is below the least useful value {least}")
        for name, seconds in (("lease_seconds", self.lease_seconds), ("drain_seconds", self.drain_seconds)):
            if not 0 < seconds <= 86400:
                raise InvalidArgument(f"{name}={seconds} is outside (0, 86400]")
        self._check_retention()

    def _check_retention(self) -> None:
        if not 0 <= self.pin_share <= 0.8:
            raise InvalidArgument(
                f"pin_share={self.pin_share} is outside [0, 0.8]: what is not pinned needs room too"
            )
        for quota in (self.tenant_bytes, *self.tenant_quotas.values()):
            if quota < 0:
                raise InvalidArgument(f"tenant_bytes={quota}: give the bytes of a tenant, or 0 for no limit")
        for name, seconds in (("ttl_seconds", self.ttl_seconds), ("max_age_seconds", self.max_age_seconds)):
            if seconds and not 1 <= seconds < math.inf:
                raise InvalidArgument(f"{name}={seconds}: give a second or more, or 0 for no limit")

    @property
    def catalog_bytes(self) -> int:
        """Share of ``disk_bytes`` set aside for the catalogue."""
        return max(4 * MIB, self.disk_bytes // 32)

    @property
    def payload_bytes(self) -> int:
        """Share of ``disk_bytes`` for block payloads."""
        return self.disk_bytes - self.catalog_bytes
