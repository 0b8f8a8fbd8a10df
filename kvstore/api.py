"""The five verbs (match, load, reserve, commit, release) as callers see them.

``KVStore`` is the synchronous face that the embedded store (``kvstore.open``) and the
client of a daemon (``kvstore.connect``) share; a worker cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from kvstore.errors import InvalidArgument
from kvstore.layout import BLOCK_TOKENS
from kvstore.namespace import Namespace
from kvstore.units import PersistPoint, UnitMark


class Tier(StrEnum):
    """Where a block was found."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class MissReason(StrEnum):
    """Why a match falls short of the whole prompt; machine-readable and counted."""

    NONE = "none"  # nothing was missing but the token that is always computed
    SHORTER_THAN_BLOCK = "shorter_than_block"  # such content is never cached
    NEVER_SEEN = "never_seen"  # the next block is not stored and was not seen lately
    NOT_STORED = "not_stored"  # seen lately, and no worker came to store it
    REFUSED = "refused"  # it was to be stored, and the arena had no room for it
    FAILED = "failed"  # storing it began and did not end: the worker gave up, or the disk failed
    EVICTED = "evicted"  # was stored, and left a full disk
    EXPIRED = "expired"  # was stored, and not used for too long, or stored too long ago
    DELETED = "deleted"  # was stored, and an operator deleted it
    LOST = "lost"  # was stored, and its bytes came back damaged or not at all
    DIVERGED = "diverged"  # the stored chain goes on with other tokens
    NO_UNIT = "no_unit"  # stored further, but no unit ends there
    PENDING = "pending"  # another worker is filling the next block
    UNAVAILABLE = "unavailable"  # the store did not answer
    UNKNOWN = "unknown"  # the daemon is newer, and its reason is not known here


@dataclass(frozen=True, slots=True)
class Match:
    """Answer of Match. ``blocks`` leading blocks are usable; they lie in these tiers."""

    blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    unit: bytes | None = None  # hash of the unit that was hit
    unit_blocks: int = 0  # its length; >= blocks, since some token is always computed
    stored_blocks: int = 0  # leading blocks that are stored, unit or not
    reason: MissReason = MissReason.NONE
    persist_points: tuple[PersistPoint, ...] = ()
    interval: int = 0  # tokens between interval marks, for the answer; 0 is off
    epoch: int | None = None  # of the namespace; None if the store did not say


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """A readable block: its index in the ``hashes`` of the Load, and its bytes.

    ``data`` (read-only, ``layout.block_bytes`` long) is the caller's until the next step
    of the iteration or the end of the ``with``; then it is released, a later use is an error, and its
    slot goes back as a credit. An array over it, or a part of it, keeps the slot as long as it lives.
    (A tensor of ``torch.frombuffer`` does not: copy it before.)
    """

    index: int
    data: memoryview


GROUP_BYTES = 16  # of a group's name
MAX_READERS = 1024


@dataclass(frozen=True, slots=True)
class Readers:
    """Loads of one document that are to read the disk once, such as those of tensor-parallel ranks.

    ``group`` is a name of 16 bytes, made up at random for each document load and passed to
    all of its ``count`` readers, each of which opens a Load of its own with it. They are kept
    near each other: one that is far ahead waits, but only a moment for one that stands still
    or does not come; that one reads again what it missed.

    Raises ``InvalidArgument``.
    """

    group: bytes
    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.group, bytes) or len(self.group) != GROUP_BYTES:
            raise InvalidArgument(f"readers of group {self.group!r:.60}: name it by {GROUP_BYTES} bytes")
        if not 1 <= self.count <= MAX_READERS:
            raise InvalidArgument(f"{self.count!r} readers of one load: write a number in [1, {MAX_READERS}]")


class Load(Protocol):
    """A lease over blocks being read. Iterate it inside ``with``; batches come in order.

    It ends with the ``with``, when its store is closed, or in the background when it is dropped.

    ``short`` is None while every block asked for has come or may still come; else the
    number of leading ``hashes`` that are usable (``first`` included), and iteration ends.
    """

    @property
    def short(self) -> int | None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __iter__(self) -> Iterator[list[LoadedBlock]]: ...


class ReserveState(IntEnum):
    """What Reserve says of one block."""

    PRESENT = 0  # stored already; nothing to do
    PENDING = 1  # another worker is filling it; nothing to do
    FILL = 2  # a slot was given: write all its bytes, then Commit
    RETRY = 3  # the arena is full of unwritten or held blocks: come back


@dataclass(frozen=True, slots=True)
class ReservedBlock:
    """One block's outcome; ``data`` (writable, ``layout.block_bytes`` long) only with FILL.

    ``data`` is the caller's until Commit or Release names it; then it is released: a later use is an error.
    """

    hash: bytes
    state: ReserveState
    data: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """Answer of Reserve. ``lease`` keeps what is present and the slots that were given."""

    lease: int
    blocks: tuple[ReservedBlock, ...]

    @property
    def retry(self) -> int:
        """How many of the last blocks got no slot."""
        return sum(block.state is ReserveState.RETRY for block in self.blocks)


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Use of one tier, in bytes and blocks."""

    used_bytes: int
    capacity_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Status:
    """A snapshot of a store."""

    host: TierStatus
    disk: TierStatus
    # "ok"; "host_only" while the disk cannot be written; "degraded" while a background task is started again
    mode: str
    pinned: bool  # whether the arena is locked in memory
    dirty_blocks: int
    units: int
    leases: int
    namespaces: int
    counters: dict[str, int] = field(default_factory=dict)


@runtime_checkable
class KVStore(Protocol):
    """The verbs. Thread-safe; every call ends within ``timeout`` (seconds).

    In a forked child every call raises ``Forked``, Match and Load are a miss, and ``close`` does nothing.

    All raise ``Unavailable`` / ``DeadlineExceeded`` when the store cannot answer, save
    Match and Load, which are a miss then. ``namespace`` is the digest that
    ``open_namespace`` returned, and raises ``NamespaceUnknown`` if the store has lost it.
    """

    def open_namespace(self, namespace: Namespace) -> bytes:
        """Register a namespace; returns its digest, the key of ``hashing.block_hashes``.

        Raises ``CapacityTooSmall`` when a tier cannot hold a block of its layout.
        """

    def match(
        self,
        namespace: bytes,
        hashes: Sequence[bytes],
        tokens: int,
        *,
        align: int = BLOCK_TOKENS,
        store: bool = False,
        counted: int = 0,
    ) -> Match:
        """How much of a prompt of ``tokens`` tokens can be loaded.

        The hit is at most ``tokens - 1`` tokens, rounded down to ``align``. Pure, unless
        ``store`` announces that the caller will store this prompt: then the chain is
        remembered and a common prefix that it shows becomes a unit.

        A daemon counts hit and miss tokens by request. Who asks more than once for one says how
        many leading tokens an earlier Match was ``counted`` for.

        The answer's ``epoch`` moves when something of the namespace is deleted: then whoever
        keeps blocks of it (a DEVICE pool) drops them.
        """

    def load(
        self,
        namespace: bytes,
        hashes: Sequence[bytes],
        *,
        first: int = 0,
        timeout: float = 60.0,
        readers: Readers | None = None,
        counted: int = 0,
    ) -> Load:
        """Read ``hashes[first:]``. ``timeout`` bounds the wait for each batch.

        ``readers`` says that others load the same document now. Raises ``InvalidArgument``
        when they gave another number of readers.

        A daemon counts what was delivered by request, and once for all readers of a group. Who loads
        more than once for one request says how many leading hashes an earlier Load was ``counted`` for.
        """

    def reserve(
        self,
        namespace: bytes,
        parent: bytes,
        hashes: Sequence[bytes],
        *,
        lease: int = 0,
        epoch: int | None = None,
    ) -> Reservation:
        """Ask for slots for consecutive blocks behind ``parent`` (``hashing.ROOT`` at the start).

        ``lease`` adds to an earlier reservation. ``epoch`` is that of the Match by which the blocks
        were made: with it nothing comes back that was deleted since. Raises ``ParentMissing`` when
        ``parent`` is not stored, ``LeaseUnknown`` for an expired or foreign lease, ``EpochPassed``.
        """

    def commit(self, lease: int, hashes: Sequence[bytes], units: Sequence[UnitMark] = ()) -> int:
        """Seal filled blocks and mark units; returns a ticket. Acknowledged means readable.

        Ends the views of these blocks, also when it is refused: Reserve under the same lease gives new
        ones. ``StillWritten`` says that an array over a view, or a part of it, could still change a block.
        Either all of it happens or, with ``NotReserved`` / ``LeaseUnknown``, nothing.
        A unit's last block must be stored, or in this or an earlier commit.
        """

    def durable(self, ticket: int, *, timeout: float = 60.0) -> bool:
        """Wait until a commit is on disk; False if that could not be had.

        Raises ``TicketUnknown``, and ``DeadlineExceeded`` when it takes longer.
        """

    def release(self, lease: int) -> None:
        """End a lease: unfilled slots return, holds end, views too. Unknown leases are ignored.

        A store that does not answer, or is closed, holds nothing: that is no error here.
        """

    def status(self) -> Status:
        """Sizes, mode and counters."""

    def close(self) -> None:
        """Release everything this caller holds, its open Loads and views too; a second call does nothing."""
