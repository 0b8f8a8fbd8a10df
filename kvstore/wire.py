"""Domain types <-> protobuf, and error classes <-> gRPC statuses.

Whatever arrives is bounded and checked here, so both ends see domain types only. An
error travels as its status code and message, with its class named in the trailing
metadata; the other end raises the same class.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import grpc

from kvstore import errors
from kvstore.api import Match, MissReason, Readers, ReserveState, Status, TierStatus
from kvstore.arguments import MAX_HASHES as MAX_HASHES
from kvstore.arguments import bounded_hashes, bounded_tokens
from kvstore.arguments import digest as digest
from kvstore.arguments import unsigned as unsigned
from kvstore.errors import DeadlineExceeded, InvalidArgument, KVStoreError, Unavailable
from kvstore.hashing import HASH_BYTES, split_hashes
from kvstore.namespace import Namespace
from kvstore.units import PersistPoint, UnitKind, UnitMark
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import operator_pb2 as operator_pb

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["KVStore"].full_name
HANDOVER_VERSION = 1
TOKEN_BYTES = 16
MAX_NAMESPACE_CHARS = 1 << 14  # of JSON: twice what a store opens, for not all write it as densely
MAX_MESSAGE_BYTES = 8 << 20  # the hashes of one call, and as much again
CHUNK_BYTES = 1 << 20
ERROR_KEY = "latentkv-error"
BASES_KEY = "latentkv-error-bases"  # the classes above it, for a client that does not know this one
WORKER_KEY = "latentkv-worker"  # metadata of a call: the token from the handover socket, in hex

_MAX_DETAILS = 600  # characters, at most 12 bytes each on the wire; peers refuse more than 8 KiB of metadata
_ALL_KINDS = UnitKind.REQUEST_END | UnitKind.COMMON_PREFIX | UnitKind.INTERVAL
_STATES = {int(state): state for state in ReserveState}
_kinds = lru_cache(64)(UnitKind)  # a prompt has many points, of few kinds


class StaleWorker(Unavailable):
    """The daemon does not know a mapped worker's token, for it has restarted: connect again."""


class DaemonFailed(Unavailable):
    """The daemon could not answer because of a fault of its own; its log has more."""


class Unheard(Unavailable):
    """The call failed on its way: whether the daemon did it is not known. Raised on this side, never sent."""


class Unreachable(Unheard):
    """Nothing answered: the transport failed. Raised on this side, never sent."""


class NotAsked(Unavailable):
    """The daemon did not answer lately, so it was not asked. Raised on this side, never sent."""


class NotUnderstood(Unavailable):
    """The daemon and we are of different releases: the message says which of us is to be upgraded."""


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
    errors.LimitReached: grpc.StatusCode.RESOURCE_EXHAUSTED,
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
    name, *bases = (cls.__name__ for cls in lineage if cls.__name__ in _CLASSES)
    return code, str(error)[:_MAX_DETAILS], ((ERROR_KEY, name), (BASES_KEY, " ".join(bases)))


def error_of_status(
    code: grpc.StatusCode, details: str | None, trailing: Iterable[tuple[str, str | bytes]]
) -> KVStoreError:
    """The error that a failed call stands for.

    A status without a class comes from the transport: ``DeadlineExceeded``, ``Unreachable`` or plain
    ``Unheard``. One with a class that only a newer daemon knows is the nearest of its bases.
    """
    sent = {key: str(value) for key, value in trailing if key in (ERROR_KEY, BASES_KEY)}
    names = (sent.get(ERROR_KEY, ""), *sent.get(BASES_KEY, "").split())
    found = next((_CLASSES[name] for name in names if name in _CLASSES), None)
    if found is not None and (found is not KVStoreError or names[0] == found.__name__):
        return found(details or "")
    if names[0]:
        return _unknown_error(code, f"{details} ({names[0]})")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return NotUnderstood(f"the daemon does not know this call ({details}); upgrade the daemon")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the daemon did not answer in time; go on without it, or raise the timeout")
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unreachable(f"the daemon cannot be reached ({details}); start it, or go on without it")
    return Unheard(f"the call failed on its way ({code.name.lower()}: {details})")


def _unknown_error(code: grpc.StatusCode, details: str) -> KVStoreError:
    """What a daemon refused by a class that we do not know: a wrong call, or else a miss."""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgument(details)
    return NotUnderstood(f"{details}; the daemon is newer than this client, which does not know that error")


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
    return b"".join(bounded_hashes(hashes))


def hashes_of(blob: bytes) -> list[bytes]:
    """Inverse of ``join_hashes``. Raises ``InvalidArgument``."""
    if len(blob) > MAX_HASHES * HASH_BYTES:
        raise InvalidArgument(f"{len(blob)} bytes of hashes in one call; send at most {MAX_HASHES} hashes")
    return split_hashes(blob)


def namespace_of(request: pb.OpenNamespaceRequest) -> Namespace:
    """The namespace to be opened. Raises ``InvalidArgument``."""
    if len(request.namespace_json) > MAX_NAMESPACE_CHARS:
        raise InvalidArgument(
            f"a namespace of {len(request.namespace_json)} characters; send at most {MAX_NAMESPACE_CHARS}"
        )
    return Namespace.from_json(request.namespace_json)


def tokens_of(request: pb.MatchRequest | operator_pb.TrailRequest) -> int:
    """The prompt's length. Raises ``InvalidArgument``: persist points are planned for each interval of it."""
    return bounded_tokens(request.tokens)


def match_request(
    namespace: bytes, hashes: Sequence[bytes], tokens: int, *, align: int, store: bool, counted: int
) -> pb.MatchRequest:
    """A Match as it travels. Raises ``InvalidArgument``."""
    return pb.MatchRequest(
        namespace=digest(namespace),
        hashes=join_hashes(hashes),
        tokens=bounded_tokens(tokens),
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
        reason=reason_of(response.reason),
        persist_points=tuple(map(PersistPoint, response.persist_tokens, map(_kinds, response.persist_kinds))),
        interval=response.interval,
        epoch=response.epoch if response.HasField("epoch") else None,
    )


def reason_of(name: str) -> MissReason:
    """A miss's reason; that of a newer daemon may be ``UNKNOWN`` to us."""
    try:
        return MissReason(name)
    except ValueError:
        log.info("event=reason_unknown reason=%.40r is of a newer daemon; upgrade this client", name)
        return MissReason.UNKNOWN


def states_of(response: pb.ReserveResponse, hashes: Sequence[bytes], *, mapped: bool) -> list[ReserveState]:
    """What Reserve says of each block; what only a newer daemon knows is nothing to do now.

    Raises ``NotUnderstood`` for an answer that does not fit the question.
    """
    states = [_STATES.get(state, ReserveState.PENDING) for state in response.states]
    fills = states.count(ReserveState.FILL)
    if len(states) != len(hashes) or (mapped and len(response.offsets) != fills):
        raise NotUnderstood(
            f"the daemon answered {len(hashes)} blocks with {len(states)} states and {len(response.offsets)}"
            f" offsets for {fills}; run the same release on both sides"
        )
    return states


def load_start(
    identity: WorkerId,
    namespace: bytes,
    hashes: Sequence[bytes],
    first: int,
    readers: Readers | None,
    counted: int = 0,
) -> pb.LoadRequest:
    """The first message of a Load. Raises ``InvalidArgument``."""
    return pb.LoadRequest(
        start=pb.LoadStart(
            namespace=digest(namespace),
            hashes=join_hashes(hashes),
            first=unsigned("first", first, 32),
            worker=worker(identity),
            readers=None if readers is None else pb.Readers(group=readers.group, count=readers.count),
            counted=unsigned("counted", counted, 32),
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
