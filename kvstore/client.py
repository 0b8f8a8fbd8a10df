"""The verbs against a daemon: what ``kvstore.connect(url)`` returns.

On the daemon's host blocks go through its arena, mapped here; elsewhere, or when the
arena can't be had, they travel as bytes. The caller cannot tell which.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvstore import uploads, wire
from kvstore.api import (
    Load,
    Match,
    MissReason,
    Readers,
    Reservation,
    ReservedBlock,
    ReserveState,
    Status,
)
from kvstore.errors import ArenaUnavailable, LeaseUnknown, NamespaceUnknown, Unavailable
from kvstore.identity import Identity
from kvstore.layout import BLOCK_TOKENS
from kvstore.mapping import Mapping, open_mapping
from kvstore.namespace import Namespace
from kvstore.remote_load import ByteLoad, EndedLoad, LoadCall, MappedLoad, Wanted
from kvstore.reopening import Opened, reopening
from kvstore.transport import Transport
from kvstore.units import UnitMark
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import WorkerId

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_RELEASE_TIMEOUT = 1.0  # seconds to tell a daemon that has just failed to answer


@dataclass(eq=False)
class _Lease:
    """A reservation: the daemon's id, the arena it was made in, and the bytes to be filled."""

    id: int
    mapping: Mapping | None
    fills: dict[bytes, memoryview] = field(default_factory=dict)


class Client:
    """``kvstore.api.KVStore`` over a daemon. Thread-safe; not to be used after a fork."""

    def __init__(self, url: str, timeout: float, identity: Identity) -> None:
        """Raises ``InvalidArgument``."""
        self._transport = Transport(url, timeout, identity)
        # A token says who calls; the handover socket would say another, by our uid.
        self._handover = "" if identity.token else self._transport.address.path
        self._remote = WorkerId(secrets.token_bytes(wire.TOKEN_BYTES), mapped=False)
        self.opened = Opened()
        self._lock = threading.Lock()  # over what follows, never held across I/O
        self._block_bytes: dict[bytes, int] = {}  # by namespace digest
        self._damaged = 0  # blocks whose bytes came with a wrong checksum
        # By ids of our own: a daemon's id does not say which run of it gave the lease.
        self._leases: dict[int, _Lease] = {}
        self._ids = itertools.count(1)
        self._mapping_lock = threading.Lock()
        self._mapping: Mapping | None = None

    def open_namespace(self, namespace: Namespace) -> bytes:
        """See ``KVStore.open_namespace``."""
        request = pb.OpenNamespaceRequest(namespace_json=namespace.to_json())
        response = self._transport.call(self._transport.stub.OpenNamespace, request)
        with self._lock:
            self._block_bytes[response.digest] = namespace.layout.block_bytes
        self.opened.note(response.digest, namespace)
        return bytes(response.digest)

    def _block_bytes_of(self, namespace: bytes) -> int:
        nbytes = self._block_bytes.get(wire.digest(namespace))
        if nbytes is None:
            raise NamespaceUnknown(
                f"namespace {namespace[:8].hex()} was not opened by this client; call open_namespace first"
            )
        return nbytes

    @reopening
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
        """See ``KVStore.match``."""
        request = wire.match_request(namespace, hashes, tokens, align=align, store=store, counted=counted)
        try:
            return wire.match_of(self._transport.call(self._transport.stub.Match, request))
        except Unavailable as error:
            _log_unanswered("match", error)
            return Match(reason=MissReason.UNAVAILABLE)

    @reopening
    def load(
        self,
        namespace: bytes,
        hashes: Sequence[bytes],
        *,
        first: int = 0,
        timeout: float = 60.0,
        readers: Readers | None = None,
    ) -> Load:
        """See ``KVStore.load``."""
        block_bytes = self._block_bytes_of(namespace)

        def start(mapping: Mapping | None) -> Load:
            request = wire.load_start(self._identity(mapping), namespace, hashes, first, readers)
            return self._start_load(mapping, request, Wanted(first, len(hashes), block_bytes, timeout))

        try:
            return self._with_arena(start)
        except Unavailable as error:
            _log_unanswered("load", error)
            return EndedLoad(first)

    def _start_load(self, mapping: Mapping | None, request: pb.LoadRequest, wanted: Wanted) -> Load:
        call = LoadCall(request, self._transport.open_load, self._transport.breaker.trip)
        timeout = min(wanted.timeout, self._transport.timeout)
        try:
            lease = call.receive_lease(timeout)
        except BaseException:
            call.cancel()
            raise
        if mapping is None:
            return ByteLoad(call, wanted, self._count_damaged)
        mapping.use()
        return MappedLoad(call, wanted, mapping, lambda: self._free(lease, mapping))

    def _count_damaged(self) -> None:
        with self._lock:
            self._damaged += 1

    @reopening
    def reserve(
        self,
        namespace: bytes,
        parent: bytes,
        hashes: Sequence[bytes],
        *,
        lease: int = 0,
        epoch: int | None = None,
    ) -> Reservation:
        """See ``KVStore.reserve``."""
        block_bytes = self._block_bytes_of(namespace)
        request = pb.ReserveRequest(
            namespace=namespace,
            parent=wire.digest(parent),
            hashes=wire.join_hashes(hashes),
            epoch=None if epoch is None else wire.unsigned("epoch", epoch),
        )
        if lease:
            held = self._lease(lease)
            response = self._reserve(held.mapping, request, held.id)
        else:
            held, response = self._with_arena(lambda mapping: self._reserve_anew(mapping, request))
            lease = next(self._ids)
            with self._lock:
                self._leases[lease] = held
        return Reservation(lease, tuple(_reserved(held, hashes, response, block_bytes)))

    def _reserve_anew(
        self, mapping: Mapping | None, request: pb.ReserveRequest
    ) -> tuple[_Lease, pb.ReserveResponse]:
        response = self._reserve(mapping, request, 0)
        if mapping is not None:
            mapping.use()
        return _Lease(response.lease, mapping), response

    def _reserve(self, mapping: Mapping | None, request: pb.ReserveRequest, lease: int) -> pb.ReserveResponse:
        request.lease = lease
        request.worker.CopyFrom(wire.worker(self._identity(mapping)))
        with _stale_lease(lease):
            response: pb.ReserveResponse = self._transport.call(self._transport.stub.Reserve, request)
            return response

    def commit(self, lease: int, hashes: Sequence[bytes], units: Sequence[UnitMark] = ()) -> int:
        """See ``KVStore.commit``. Ends the views of what was committed."""
        held = self._lease(lease)
        identity = self._identity(held.mapping)
        request = pb.CommitRequest(
            lease=held.id,
            hashes=wire.join_hashes(hashes),
            units=wire.marks(units),
            worker=wire.worker(identity),
        )
        with _stale_lease(lease):
            if held.mapping is None:
                self._upload(held, hashes)
            response = self._transport.call(self._transport.stub.Commit, request)
        for block in hashes:
            _end_view(held.fills.pop(block, None))
        return int(response.ticket)

    def _upload(self, held: _Lease, hashes: Sequence[bytes]) -> None:
        blocks = [(block, held.fills[block]) for block in hashes if block in held.fills]
        for batch in uploads.batches(blocks):
            self._transport.upload(uploads.pieces(self._remote, held.id, batch))

    def durable(self, ticket: int, *, timeout: float = 60.0) -> bool:
        """See ``KVStore.durable``."""
        request = pb.DurableRequest(ticket=wire.unsigned("ticket", ticket))
        return bool(self._transport.call(self._transport.stub.Durable, request, timeout).durable)

    def release(self, lease: int) -> None:
        """See ``KVStore.release``. Ends the views of what was not committed."""
        with self._lock:
            held = self._leases.pop(lease, None)
        if held is None:
            return
        for view in held.fills.values():
            _end_view(view)
        if held.mapping is not None:
            held.mapping.done()
        self._free(held.id, held.mapping)

    def _free(self, lease: int, mapping: Mapping | None) -> None:
        """Tell the daemon that a lease is over; it learns by the connection's end otherwise."""
        request = pb.ReleaseRequest(lease=lease, worker=wire.worker(self._identity(mapping)))
        try:
            self._transport.call(self._transport.stub.Release, request, _RELEASE_TIMEOUT)
        except Unavailable as error:
            log.info("event=release_unheard reason=%s", error)
            if mapping is not None:
                self._retire(mapping)

    def status(self) -> Status:
        """See ``KVStore.status``. Its counters have ours too, as ``client_...``."""
        status = wire.status_of(self._transport.call(self._transport.stub.Status, pb.StatusRequest()))
        ours = self._transport.breaker.counters() | {"damaged_blocks": self._damaged}
        return replace(status, counters=status.counters | {f"client_{name}": ours[name] for name in ours})

    def close(self) -> None:
        """Release everything and end the connection. A load that is open keeps its views until it ends."""
        for lease in list(self._leases):
            self.release(lease)
        with self._mapping_lock:
            mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.retire()
        self._transport.close()

    # --- the arena

    def _identity(self, mapping: Mapping | None) -> WorkerId:
        return self._remote if mapping is None else mapping.identity

    def _lease(self, lease: int) -> _Lease:
        with self._lock:
            held = self._leases.get(lease)
        if held is None:
            raise LeaseUnknown(f"lease {lease!r} is not held by this client; reserve without a lease")
        return held

    def _with_arena(self, action: Callable[[Mapping | None], Result]) -> Result:
        """Run an action with the live arena, or None for bytes; again if the daemon has restarted."""
        self._transport.require_usable()
        try:
            return self._run_with_arena(action)
        except wire.StaleWorker:
            return self._run_with_arena(action)

    def _run_with_arena(self, action: Callable[[Mapping | None], Result]) -> Result:
        mapping = self._take_mapping()
        try:
            return action(mapping)
        except Unavailable:
            # Slots may be announced or reserved for us without our knowing.
            if mapping is not None:
                self._retire(mapping)
            raise
        finally:
            if mapping is not None:
                mapping.done()

    def _take_mapping(self) -> Mapping | None:
        """The live mapping, in use by the caller until ``done``; None if the arena can't be had."""
        path = self._handover
        if not path:
            return None
        with self._mapping_lock:
            if self._mapping is not None and not self._mapping.alive():
                self._mapping.retire()
                self._mapping = None
            if self._mapping is None:
                timeout = self._transport.timeout
                try:
                    with self._transport.noting_silence(time.monotonic() + timeout):
                        self._mapping = open_mapping(path, timeout)
                except ArenaUnavailable as error:
                    log.info("event=arena_unavailable reason=%s", error)
                    return None
            self._mapping.use()
            return self._mapping

    def _retire(self, mapping: Mapping) -> None:
        with self._mapping_lock:
            if self._mapping is mapping:
                self._mapping = None
        mapping.retire()


def _log_unanswered(verb: str, error: Unavailable) -> None:
    # That the circuit opened was logged; a line for each call that it refuses would be a flood.
    level = logging.DEBUG if isinstance(error, wire.NotAsked) else logging.WARNING
    log.log(level, "event=%s_unanswered reason=%s", verb, error)


@contextlib.contextmanager
def _stale_lease(lease: int) -> Iterator[None]:
    """What was leased from a daemon that is gone is gone."""
    try:
        yield
    except wire.StaleWorker as error:
        if not lease:
            raise
        raise LeaseUnknown(f"lease {lease} ended with the daemon that gave it; reserve again") from error


def _reserved(
    held: _Lease, hashes: Sequence[bytes], response: pb.ReserveResponse, block_bytes: int
) -> Iterator[ReservedBlock]:
    offsets = iter(response.offsets)
    for block, state in zip(hashes, map(ReserveState, response.states), strict=True):
        if state is not ReserveState.FILL:
            yield ReservedBlock(block, state)
            continue
        if held.mapping is not None:
            held.fills[block] = held.mapping.view(next(offsets), block_bytes)
        elif block not in held.fills:
            held.fills[block] = memoryview(bytearray(block_bytes))
        yield ReservedBlock(block, state, held.fills[block])


def _end_view(view: memoryview | None) -> None:
    if view is not None:
        with contextlib.suppress(BufferError):  # an array over it is still alive
            view.release()
