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
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

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
from kvstore.attachment import Attachment
from kvstore.delivery import BlockLoad, EndedLoad
from kvstore.ending import end_when_dropped
from kvstore.errors import LeaseUnknown, NamespaceUnknown, Unavailable
from kvstore.forking import Home
from kvstore.identity import Identity
from kvstore.layout import BLOCK_TOKENS
from kvstore.lending import Fills, when_unseen
from kvstore.mapping import Mapping
from kvstore.namespace import Namespace
from kvstore.remote_load import ByteLoad, LoadCall, MappedLoad, Wanted
from kvstore.reopening import Opened, reopening
from kvstore.transport import Transport
from kvstore.units import UnitMark
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import WorkerId

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Lease:
    """A reservation: the daemon's id, the arena it was made in, and what is being filled.

    ``bytes`` are the blocks that travel.
    """

    id: int
    mapping: Mapping | None
    fills: Fills = field(default_factory=Fills)
    bytes: dict[bytes, bytearray] = field(default_factory=dict)


class Client:
    """``kvstore.api.KVStore`` over a daemon. Thread-safe; close it, or drop it.

    In a forked child every call is refused, and closing does nothing: connect again there.
    """

    def __init__(self, url: str, timeout: float, identity: Identity) -> None:
        """Raises ``InvalidArgument``."""
        self._home = Home()
        self._transport = transport = Transport(url, timeout, identity)
        self._remote = WorkerId(secrets.token_bytes(wire.TOKEN_BYTES), mapped=False)
        # A token says who calls; the handover socket would say another, by our uid.
        handover = "" if identity.token else transport.address.path
        self._attachment = Attachment(transport, self._remote, handover=handover)
        self.opened = Opened()
        self._lock = threading.Lock()  # over what follows, never held across I/O
        self._block_bytes: dict[bytes, int] = {}  # by namespace digest
        self._damaged = 0  # blocks whose bytes came with a wrong checksum
        # By ids of our own: a daemon's id does not say which run of it gave the lease.
        self._leases: dict[int, _Lease] = {}
        self._ids = itertools.count(1)
        self._loads: weakref.WeakSet[BlockLoad] = weakref.WeakSet()
        self._ending = end_when_dropped(self, partial(_close, self._attachment, self._leases, self._loads))

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
        counted: int = 0,
    ) -> Load:
        """See ``KVStore.load``."""
        block_bytes = self._block_bytes_of(namespace)

        end_timeout = min(timeout, self._transport.timeout)
        wanted = Wanted(first, len(hashes), block_bytes, timeout, end_timeout)

        def start(mapping: Mapping | None) -> BlockLoad:
            identity = self._attachment.identity(mapping)
            request = wire.load_start(identity, namespace, hashes, first, readers, counted)
            return self._start_load(mapping, request, wanted)

        try:
            load = self._attachment.with_arena(start)
        except Unavailable as error:
            _log_unanswered("load", error)
            return EndedLoad(first)
        self._loads.add(load)
        if not self._ending.alive:  # closed meanwhile, by another thread
            load.close(wait=False)
        return load

    def _start_load(self, mapping: Mapping | None, request: pb.LoadRequest, wanted: Wanted) -> BlockLoad:
        call = LoadCall(request, self._transport.open_load, self._transport.breaker)
        timeout = min(wanted.timeout, self._transport.timeout)
        try:
            lease = call.receive_lease(timeout)
        except BaseException:
            call.cancel()
            raise
        if mapping is None:
            return ByteLoad(call, wanted, self._count_damaged, self)
        mapping.use()
        return MappedLoad(call, wanted, mapping, partial(self._attachment.free, lease, mapping), self)

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
            held, response = self._attachment.with_arena(lambda mapping: self._reserve_anew(mapping, request))
            lease = self._keep(held)
        try:
            return Reservation(lease, tuple(_reserved(held, hashes, response, block_bytes)))
        except wire.NotUnderstood:
            self.release(lease)
            raise

    def _keep(self, held: _Lease) -> int:
        lease = next(self._ids)
        with self._lock:
            self._leases[lease] = held
        if not self._ending.alive:  # closed meanwhile, by another thread
            self.release(lease)
        return lease

    def _reserve_anew(
        self, mapping: Mapping | None, request: pb.ReserveRequest
    ) -> tuple[_Lease, pb.ReserveResponse]:
        response = self._reserve(mapping, request, 0)
        if mapping is not None:
            mapping.use()
        return _Lease(response.lease, mapping), response

    def _reserve(self, mapping: Mapping | None, request: pb.ReserveRequest, lease: int) -> pb.ReserveResponse:
        request.lease = lease
        request.worker.CopyFrom(wire.worker(self._attachment.identity(mapping)))
        with _stale_lease(lease):
            response: pb.ReserveResponse = self._transport.call(self._transport.stub.Reserve, request)
            return response

    def commit(self, lease: int, hashes: Sequence[bytes], units: Sequence[UnitMark] = ()) -> int:
        """See ``KVStore.commit``."""
        held = self._lease(lease)
        request = pb.CommitRequest(
            lease=held.id,
            hashes=wire.join_hashes(hashes),
            units=wire.marks(units),
            worker=wire.worker(self._attachment.identity(held.mapping)),
        )
        held.fills.seal(hashes)
        with _stale_lease(lease):
            if held.mapping is None:
                self._upload(held, hashes)
            response = self._transport.call(self._transport.stub.Commit, request)
        held.fills.forget(hashes)
        for block in hashes:
            held.bytes.pop(block, None)
        return int(response.ticket)

    def _upload(self, held: _Lease, hashes: Sequence[bytes]) -> None:
        blocks = [(block, memoryview(held.bytes[block])) for block in hashes if block in held.bytes]
        for batch in uploads.batches(blocks):
            self._transport.upload(uploads.pieces(self._remote, held.id, batch))

    def durable(self, ticket: int, *, timeout: float = 60.0) -> bool:
        """See ``KVStore.durable``."""
        request = pb.DurableRequest(ticket=wire.unsigned("ticket", ticket))
        return bool(self._transport.call(self._transport.stub.Durable, request, timeout).durable)

    def release(self, lease: int) -> None:
        """See ``KVStore.release``. A daemon that does not answer learns of it by the connection's end."""
        self._require_home()
        with self._lock:
            held = self._leases.pop(lease, None)
        if held is not None:
            _release(self._attachment, held)

    def status(self) -> Status:
        """See ``KVStore.status``. Its counters have ours too, as ``client_...``."""
        status = wire.status_of(self._transport.call(self._transport.stub.Status, pb.StatusRequest()))
        ours = self._transport.breaker.counters() | {"damaged_blocks": self._damaged}
        return replace(status, counters=status.counters | {f"client_{name}": ours[name] for name in ours})

    def close(self) -> None:
        """End all that is left, in a second at most: loads, leases, their views, and the connection."""
        if self._home.here and self._ending.detach() is not None:
            _close(self._attachment, self._leases, self._loads)

    def _require_home(self) -> None:
        self._home.require("client", "connect again")

    def _lease(self, lease: int) -> _Lease:
        self._require_home()
        with self._lock:
            held = self._leases.get(lease)
        if held is None:
            raise LeaseUnknown(f"lease {lease!r} is not held by this client; reserve without a lease")
        return held


def _close(attachment: Attachment, leases: dict[int, _Lease], loads: weakref.WeakSet[BlockLoad]) -> None:
    attachment.begin_end()
    for load in list(loads):
        load.close(wait=False)
    for lease in list(leases):
        held = leases.pop(lease, None)  # unless another thread releases it
        if held is not None:
            _release(attachment, held)
    attachment.close()


def _release(attachment: Attachment, held: _Lease) -> None:
    """End a lease: its views at once, its slots once nobody can write to them any more."""

    def leave() -> None:
        if held.mapping is not None:
            held.mapping.done()
        attachment.free(held.id, held.mapping)

    seen = held.fills.end()
    when_unseen(() if held.mapping is None else seen, leave)


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
    states = wire.states_of(response, hashes, mapped=held.mapping is not None)
    offsets = iter(response.offsets)
    for block, state in zip(hashes, states, strict=True):
        if state is not ReserveState.FILL:
            yield ReservedBlock(block, state)
            continue
        if held.mapping is not None:
            memory = held.mapping.view(next(offsets), block_bytes)
        else:
            memory = memoryview(held.bytes.setdefault(block, bytearray(block_bytes)))
        yield ReservedBlock(block, state, held.fills.lend(block, memory))
