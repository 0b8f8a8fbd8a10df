"""The gRPC channel to a daemon: deadlines, reconnection, and errors as our classes."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from kvstore import wire
from kvstore.address import Address
from kvstore.breaker import CircuitBreaker
from kvstore.errors import DeadlineExceeded, InvalidArgument, KVStoreError, Unauthenticated, Unavailable
from kvstore.forking import Home
from kvstore.identity import Identity
from kvstore.proof import Proof
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import kvstore_pb2_grpc

_PROBE_SECONDS = 0.1
_SIGN_SECONDS = 0.5  # for a sign of life; a daemon on the same host needs a millisecond
_OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),  # how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # one client's backoff is no other's
)


def error_of(failure: grpc.RpcError) -> KVStoreError:
    """The error that a failed call stands for."""
    # Every error that a call raises is the call itself, which the stubs' types don't say.
    call: Any = failure
    return wire.error_of_status(call.code(), call.details(), call.trailing_metadata() or ())


class Transport:
    """A channel to a daemon's address. Thread-safe; connects when first used.

    A call that runs into its deadline opens the circuit ``breaker``, and calls are refused until
    the daemon answers again. A daemon that is gone needs none: nobody listens, which is known at once.

    Refuses every call after a fork: the channel's threads stay with the parent.
    """

    def __init__(self, url: str, timeout: float, identity: Identity) -> None:
        """Raises ``InvalidArgument``."""
        self.address = _parse(url)
        self.timeout = timeout
        self._home = Home()
        self._closed = False
        self.channel = _open(self.address, identity)
        self._proof = Proof(identity, self.address.path)
        self.stub: Any = kvstore_pb2_grpc.KVStoreStub(self.channel)
        self.breaker = CircuitBreaker(self._lives)

    def _lives(self) -> bool:
        """Whether the daemon answers; what it says does not matter."""
        return self._answers(_SIGN_SECONDS)

    def _answers(self, timeout: float) -> bool:
        # A pure call that may be given up: a real one must not run twice.
        try:
            self.stub.Status(
                pb.StatusRequest(), timeout=timeout, wait_for_ready=True, metadata=self._proof.metadata()
            )
        except grpc.RpcError as failure:
            return isinstance(error_of(failure), Unauthenticated)
        except ValueError:  # the channel was closed meanwhile
            return False
        return True

    def require_usable(self) -> None:
        """Raises ``Forked`` in a child, ``Unavailable`` after ``close`` and while the circuit is open."""
        self._home.require("client", "connect again")
        if self._closed:
            raise Unavailable("this client is closed; connect again")
        if self.breaker.refuses():
            raise wire.NotAsked("the daemon did not answer in time, and is asked no more until it does")

    def call(self, verb: Callable[..., Any], request: Any, timeout: float | None = None) -> Any:
        """One call, again once if the connection was lost and the daemon is back. Raises ours.

        One with a timeout of its own may wait for more than the daemon: its end is a doubt, not a verdict.
        """
        self.require_usable()
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        with self.noting_silence(deadline) if timeout is None else self._noting_doubt(deadline):
            try:
                return self._attempt(verb, request, deadline, wait=False)
            except wire.Unreachable:
                # The channel may be in its backoff though the daemon is there again.
                self._await_ready(deadline)
            return self._attempt(verb, request, deadline, wait=True)

    @contextlib.contextmanager
    def noting_silence(self, deadline: float) -> Iterator[None]:
        """Open the circuit if what is done within took until its deadline (monotonic seconds)."""
        try:
            yield
        except DeadlineExceeded:
            self.breaker.trip()
            raise
        except wire.Unreachable:
            if time.monotonic() >= deadline:  # a host that is gone: not even a refusal comes
                self.breaker.trip()
            raise

    @contextlib.contextmanager
    def _noting_doubt(self, deadline: float) -> Iterator[None]:
        """Ask for a sign of life if what is done within took until its deadline."""
        try:
            yield
        except (DeadlineExceeded, wire.Unreachable) as error:
            if isinstance(error, DeadlineExceeded) or time.monotonic() >= deadline:
                self.breaker.doubt()
            raise

    def _await_ready(self, deadline: float) -> None:
        """Wait for the channel as long as somebody listens. Raises ``Unreachable`` once nobody does.

        A daemon that was killed may still seem to listen for a moment, so it is asked again and again.
        """
        while time.monotonic() < deadline:
            self._probe(deadline)
            if self._answers(_PROBE_SECONDS):
                return

    def _attempt(self, verb: Callable[..., Any], request: Any, deadline: float, *, wait: bool) -> Any:
        """One call; again if the daemon asked who we are and we can tell."""
        proof = self._proof.metadata()
        try:
            return self._once(verb, request, deadline, wait=wait)
        except Unauthenticated:
            if not self._proof.renew(proof, max(deadline - time.monotonic(), 0.001)):
                raise
        return self._once(verb, request, deadline, wait=wait)

    def _once(self, verb: Callable[..., Any], request: Any, deadline: float, *, wait: bool) -> Any:
        try:
            return verb(
                request,
                timeout=max(deadline - time.monotonic(), 0.0),
                wait_for_ready=wait,
                metadata=self._proof.metadata(),
            )
        except grpc.RpcError as failure:
            raise error_of(failure) from None

    def upload(self, pieces: Iterator[pb.UploadRequest]) -> None:
        """One Upload call; not tried again, since an iterator can be sent once only."""
        self.require_usable()
        deadline = time.monotonic() + self.timeout
        with self.noting_silence(deadline):
            self._once(self.stub.Upload, pieces, deadline, wait=False)

    def open_load(self, requests: Iterator[pb.LoadRequest]) -> Any:
        """Start a Load stream. Raises ``Unreachable`` at once if nobody listens."""
        self.require_usable()
        deadline = time.monotonic() + self.timeout
        with self.noting_silence(deadline):
            self._probe(deadline)
        return self.stub.Load(requests, wait_for_ready=True, metadata=self._proof.metadata())

    def _probe(self, deadline: float) -> None:
        limit = max(deadline - time.monotonic(), 0.001)
        try:
            if self.address.path:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                    probe.settimeout(limit)
                    probe.connect(self.address.path)
            else:
                socket.create_connection((self.address.bare_host, self.address.port), limit).close()
        except OSError as error:
            where = self.address.path or self.address
            raise wire.Unreachable(
                f"nothing answers at {where} ({error.strerror or error}); start the daemon or go on"
            ) from None

    def close(self) -> None:
        """End the channel, and every call on it."""
        self._closed = True
        self.breaker.close()
        if self._home.here:
            self.channel.close()
            self._proof.close()


def _parse(url: str) -> Address:
    try:
        address = Address.parse(url)
    except ValueError as error:
        raise InvalidArgument(f"url={url!r}: {error}") from None
    if not address.path and not address.port:
        raise InvalidArgument(f"url={url!r}: write the port that the daemon listens on")
    return address


def _open(address: Address, identity: Identity) -> grpc.Channel:
    """Raises ``InvalidArgument``: no secret is sent in the clear, and no certificate is left unused."""
    if address.tls:
        secured = grpc.ssl_channel_credentials(
            identity.read("ca"), identity.read("key"), identity.read("cert")
        )
        return grpc.secure_channel(address.target, secured, options=_OPTIONS)
    if identity.token and not address.local:
        raise InvalidArgument(f"a token would go to {address} in the clear; write tls://{address.target}")
    if identity.ca or identity.cert:
        raise InvalidArgument(f"{address} is not spoken to with TLS; leave ca, cert and key away")
    return grpc.insecure_channel(address.target, options=_OPTIONS)
