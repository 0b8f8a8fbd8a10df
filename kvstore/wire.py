"""Domain types <-> protobuf, and error classes <-> gRPC statuses.

Whatever arrives is bounded and checked here, so both ends see domain types only. An
error travels as its status code and message, with its class named in the trailing
metadata; the other end raises the same class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import grpc

from kvstore import errors
from kvstore.api import Match, MissReason, Readers, Status, TierStatus
from kvstore.errors import DeadlineExceeded, InvalidArgument, KVStoreError, Unavailable
from kvstore.hashing import HASH_BYTES, check_hashes, split_hashes
from kvstore.layout import BLOCK_TOKENS
from kvstore.namespace import DIGEST_BYTES, Namespace
from kvstore.units import PersistPoint, UnitKind, UnitMark
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import operator_pb2 as operator_pb

SERVICE = pb.DESCRIPTOR.services_by_name["KVStore"].full_name
HANDOVER_VERSION = 1
TOKEN_BYTES = 16
MAX_HASHES = 1 << 17  # in one call: a prompt of eight million tokens
MAX_TOKENS = MAX_HASHES * BLOCK_TOKENS
MAX_NAMESPACE_CHARS = 1 << 14  # of JSON: twice what a store opens, for not all write it as densely
MAX_MESSAGE_BYTES = 8 << 20  # the hashes of one call, and as much again
CHUNK_BYTES = 1 << 20
ERROR_KEY = "latentkv-error"
WORKER_KEY = "latentkv-worker"  # metadata of a call: the token from the handover socket, in hex

_MAX_DETAILS = 600  # characters, at most 12 bytes each on the wire; peers refuse more than 8 KiB of metadata
_ALL_KINDS = UnitKind.REQUEST_END | UnitKind.COMMON_PREFIX | UnitKind.INTERVAL
_kinds = lru_cache(64)(UnitKind)  # a prompt has many points, of few kinds


class StaleWorker(Unavailable):
    """The daemon does not know a mapped worker's token, for it has restarted: connect again."""


class DaemonFailed(Unavailable):
    """The daemon could not answer because of a fault of its own; its log has more."""


class Unreachable(Unavailable):
    """Nothing answered: the transport failed. Raised on this side, never sent."""


class NotAsked(Unavailable):
    """The daemon did not answer lately, so it was not asked. Raised on this side, never sent."""


_CODES: dict[type[KVStoreError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotCovered: grpc.StatusCode.NOT_FOUND,
    errors.NamespaceUnknown: grpc.StatusCode.NOT_FOUND,
    errors.LeaseUnknown: grpc.StatusCode.NOT_FOUND,
    errors.TicketUnknown: grpc.StatusCode.NOT_FOUND,
    errors.UnitUnknown: grpc.StatusCode.NOT_FOUND,
    errors.PinUnknown: grpc.StatusCode.NOT_FOUND,
    errors.NamespaceLimit: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.PinLimit: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnitPinned: grpc.StatusCode.FAILED_PRECONDITION,
    errors.EpochPassed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NamespaceMismatch: grpc.StatusCode.NOT_FOUND,  # also of a tenant whom the caller must not see
    errors.NotReserved: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ParentMissing: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CorruptBlock: grpc.StatusCode.DATA_LOSS,
    errors.ArenaUnavailable: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    DaemonFailed: grpc.StatusCode.INTERNAL,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    KVStoreError: grpc.StatusCode.INTERNAL,
}

_CLASSES: dict[str, type[KVStoreError]] = {
    cls.__name__: cls
    for cls in (*vars(errors).values(), StaleWorker, DaemonFailed)
    if isinstance(cls, type) and issubclass(cls, KVStoreError)
}


def status_of_error(error: KVStoreError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Status code, details and trailing metadata of an error."""
    lineage = [cls for cls in type(error).__mro__ if issubclass(cls, KVStoreError)]
    code = next(_CODES[cls] for cls in lineage if cls in _CODES)
    name = next(cls.__name__ for cls in lineage if cls.__name__ in _CLASSES)
    return code, str(error)[:_MAX_DETAILS], ((ERROR_KEY, name),)


def error_of_status(
    code: grpc.StatusCode, details: str | None, trailing: Iterable[tuple[str, str | bytes]]
) -> KVStoreError:
    """The error that a failed call stands for.

    A status without a class of ours comes from the transport: ``DeadlineExceeded``,
    ``Unreachable`` or plain ``Unavailable``.
    """
    named = next((str(value) for key, value in trailing if key == ERROR_KEY), "")
    if named in _CLASSES:
        return _CLASSES[named](details or "")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the daemon did not answer in time; go on without it, or raise the timeout")
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unreachable(f"the daemon cannot be reached ({details}); start it, or go on without it")
    return Unavailable(f"the call failed on its way ({code.name.lower()}: {details})")


@dataclass(frozen=True, slots=True)
class WorkerId:
    """Who asks: a token, and whether it came from the handover socket."""

    token: bytes
    mapped: bool


def worker(identity: WorkerId) -> pb.Worker:
    """A worker's identity as it travels."""
    return pb.Worker(token=identity.token, mapped=identity.mapped)


def worker_of(message: pb.Worker) -> WorkerId:
    """Inverse of ``worker``. Raises ``InvalidArgument``."""
    if len(message.token) != TOKEN_BYTES:
        raise InvalidArgument(f"the worker's token has {len(message.token)} bytes; send {TOKEN_BYTES}")
    return WorkerId(message.token, message.mapped)


def join_hashes(hashes: Sequence[bytes]) -> bytes:
    """Concatenated hashes. Raises ``InvalidArgument`` for a wrong length or too many."""
    if len(hashes) > MAX_HASHES:
        raise InvalidArgument(f"{len(hashes)} hashes in one call; send at most {MAX_HASHES}")
    check_hashes(hashes)
    return b"".join(hashes)


def hashes_of(blob: bytes) -> list[bytes]:
    """Inverse of ``join_hashes``. Raises ``InvalidArgument``."""
    if len(blob) > MAX_HASHES * HASH_BYTES:
        raise InvalidArgument(f"{len(blob)} bytes of hashes in one call; send at most {MAX_HASHES} hashes")
    return split_hashes(blob)


def digest(value: bytes) -> bytes:
    """``value`` if it can be a namespace's digest, or a block's hash; else ``InvalidArgument``."""
    if not isinstance(value, bytes) or len(value) != DIGEST_BYTES:
        raise InvalidArgument(f"{value[:40]!r} is no digest of {DIGEST_BYTES} bytes")
    return value


def unsigned(name: str, value: int, bits: int = 64) -> int:
    """``value`` if it fits the field; else ``InvalidArgument``."""
    if not isinstance(value, int) or not 0 <= value < 1 << bits:
        raise InvalidArgument(f"{name}={value!r} is no integer in [0, 2**{bits})")
    return value


def namespace_of(request: pb.OpenNamespaceRequest) -> Namespace:
    """The namespace to be opened. Raises ``InvalidArgument``."""
    if len(request.namespace_json) > MAX_NAMESPACE_CHARS:
        raise InvalidArgument(
            f"a namespace of {len(request.namespace_json)} characters; send at most {MAX_NAMESPACE_CHARS}"
        )
    return Namespace.from_json(request.namespace_json)


def tokens_of(request: pb.MatchRequest | operator_pb.TrailRequest) -> int:
    """The prompt's length. Raises ``InvalidArgument``: persist points are planned for each interval of it."""
    if request.tokens > MAX_TOKENS:
        raise InvalidArgument(f"tokens={request.tokens} is more than {MAX_TOKENS}; match a shorter prompt")
    return request.tokens


def match_request(
    namespace: bytes, hashes: Sequence[bytes], tokens: int, *, align: int, store: bool, counted: int
) -> pb.MatchRequest:
    """A Match as it travels. Raises ``InvalidArgument``."""
    return pb.MatchRequest(
        namespace=digest(namespace),
        hashes=join_hashes(hashes),
        tokens=unsigned("tokens", tokens),
        align=unsigned("align", align, 32),
        store=store,
        counted=unsigned("counted", counted),
    )


def match_response(match: Match) -> pb.MatchResponse:
    """A Match's answer as it travels."""
    return pb.MatchResponse(
        blocks=match.blocks,
        host_blocks=match.host_blocks,
        disk_blocks=match.disk_blocks,
        unit=match.unit or b"",
        unit_blocks=match.unit_blocks,
        stored_blocks=match.stored_blocks,
        reason=match.reason.value,
        persist_tokens=[point.tokens for point in match.persist_points],
        persist_kinds=[point.kinds for point in match.persist_points],
        interval=match.interval,
        epoch=match.epoch,
    )


def match_of(response: pb.MatchResponse) -> Match:
    """Inverse of ``match_response``."""
    return Match(
        blocks=response.blocks,
        host_blocks=response.host_blocks,
        disk_blocks=response.disk_blocks,
        unit=response.unit or None,
        unit_blocks=response.unit_blocks,
        stored_blocks=response.stored_blocks,
        reason=MissReason(response.reason),
        persist_points=tuple(map(PersistPoint, response.persist_tokens, map(_kinds, response.persist_kinds))),
        interval=response.interval,
        epoch=response.epoch if response.HasField("epoch") else None,
    )


def load_start(
    identity: WorkerId, namespace: bytes, hashes: Sequence[bytes], first: int, readers: Readers | None
) -> pb.LoadRequest:
    """The first message of a Load. Raises ``InvalidArgument``."""
    return pb.LoadRequest(
        start=pb.LoadStart(
            namespace=digest(namespace),
            hashes=join_hashes(hashes),
            first=unsigned("first", first, 32),
            worker=worker(identity),
            readers=None if readers is None else pb.Readers(group=readers.group, count=readers.count),
        )
    )


def readers_of(start: pb.LoadStart) -> Readers | None:
    """Whom a Load shares the disk with. Raises ``InvalidArgument``."""
    return Readers(start.readers.group, start.readers.count) if start.HasField("readers") else None


def load_returned(indices: Iterable[int]) -> pb.LoadRequest:
    """Credits: blocks that the worker is done with."""
    return pb.LoadRequest(returned=pb.Returned(blocks=indices))


def indices_of(message: pb.Returned) -> list[int]:
    """Inverse of ``load_returned``. Raises ``InvalidArgument``."""
    if len(message.blocks) > MAX_HASHES:
        raise InvalidArgument(f"{len(message.blocks)} blocks returned at once; send at most {MAX_HASHES}")
    return list(message.blocks)


def marks(units: Sequence[UnitMark]) -> list[pb.UnitMark]:
    """Unit marks as they travel. Raises ``InvalidArgument``."""
    return [
        pb.UnitMark(hash=digest(unit.hash), kinds=unsigned("unit kinds", int(unit.kinds), 32))
        for unit in units
    ]


def marks_of(messages: Sequence[pb.UnitMark]) -> list[UnitMark]:
    """Inverse of ``marks``. Raises ``InvalidArgument`` for kinds that don't exist, or too many units."""
    if len(messages) > MAX_HASHES:
        raise InvalidArgument(f"{len(messages)} units in one call; send at most {MAX_HASHES}")
    for message in messages:
        if not message.kinds or message.kinds & ~int(_ALL_KINDS):
            raise InvalidArgument(
                f"unit kinds {message.kinds:#x}: set some of {int(_ALL_KINDS):#x} and no other"
            )
    return [UnitMark(digest(message.hash), UnitKind(message.kinds)) for message in messages]


def status_response(status: Status) -> pb.StatusResponse:
    """A store's status as it travels."""
    return pb.StatusResponse(
        host=_tier(status.host),
        disk=_tier(status.disk),
        mode=status.mode,
        pinned=status.pinned,
        dirty_blocks=status.dirty_blocks,
        units=status.units,
        leases=status.leases,
        namespaces=status.namespaces,
        counters=status.counters,
    )


def _tier(tier: TierStatus) -> pb.TierStatus:
    return pb.TierStatus(used_bytes=tier.used_bytes, capacity_bytes=tier.capacity_bytes, blocks=tier.blocks)


def status_of(response: pb.StatusResponse) -> Status:
    """Inverse of ``status_response``."""
    return Status(
        host=_tier_of(response.host),
        disk=_tier_of(response.disk),
        mode=response.mode,
        pinned=response.pinned,
        dirty_blocks=response.dirty_blocks,
        units=response.units,
        leases=response.leases,
        namespaces=response.namespaces,
        counters=dict(response.counters),
    )


def _tier_of(message: pb.TierStatus) -> TierStatus:
    return TierStatus(message.used_bytes, message.capacity_bytes, message.blocks)
