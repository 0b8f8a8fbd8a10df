"""Hostile peers of a daemon: each function is one bounded burst, and says what came back.

They prove nothing of who they are and mean harm. A soak or a test runs them beside honest
workers, who must not notice. Each burst ends by itself, and closes what it opened.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import grpc

from kvstore import wire
from kvstore.address import Address
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import kvstore_pb2_grpc, operator_pb2

SECONDS = 10.0  # after which a peer gives up
HELD_SECONDS = 0.5  # for connections that are opened to be in the way
EMPTY_MARKS = 4_000_000  # in one message: 8 MiB, or 8 KB of gzip
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS = 0x0, 0x1, 0x3, 0x4
_END_HEADERS, _ACK, _CANCEL = 0x4, 0x1, 0x8
_CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303")  # how one begins; the rest never comes
_OPERATOR = operator_pb2.DESCRIPTOR.services_by_name["Operator"]


@dataclass(frozen=True, slots=True)
class Victim:
    """A daemon: where it answers calls, and its HTTP port if it has one."""

    url: str
    page: str = ""  # http://host:port/


Outcome = Counter[str]  # what came back, and how often
Burst = Callable[[Victim], Outcome]


# --- calls


def bombs(victim: Victim, count: int = 16) -> Outcome:
    """Commits of millions of empty marks, a few KB of gzip each, all at once."""
    message = pb.CommitRequest(lease=1, worker=pb.Worker(token=b"b" * wire.TOKEN_BYTES)).SerializeToString()
    message += b"\x1a\x00" * EMPTY_MARKS
    return _calls(victim, wire.SERVICE, "Commit", [message] * count, grpc.Compression.Gzip)


def marks(victim: Victim, count: int = 16) -> Outcome:
    """The same, not compressed."""
    return _calls(victim, wire.SERVICE, "Commit", [b"\x1a\x00" * EMPTY_MARKS] * count)


def babble(victim: Victim, count: int = 50) -> Outcome:
    """Bytes that are no message, for each verb of the operators' service and one that there is not."""
    came: Outcome = Counter()
    for verb in (*(method.name for method in _OPERATOR.methods), "Nothing"):
        came += _calls(victim, _OPERATOR.full_name, verb, [b"\xff\xff\xff"] * count)
    return came


def _calls(
    victim: Victim,
    service: str,
    verb: str,
    messages: list[bytes],
    compression: grpc.Compression = grpc.Compression.NoCompression,
) -> Outcome:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(_target(victim), options=options) as channel:
        call = channel.unary_unary(f"/{service}/{verb}", None, None)
        running = [call.future(each, timeout=SECONDS, compression=compression) for each in messages]
        return Counter(each.code().name for each in running)


def silent_loads(victim: Victim, count: int = 16, *, seconds: float = SECONDS) -> Outcome:
    """Load streams that never say what they want."""
    with grpc.insecure_channel(_target(victim)) as channel:
        stub = kvstore_pb2_grpc.KVStoreStub(channel)
        ended = threading.Event()
        running = [stub.Load(_nothing(ended), timeout=seconds) for _ in range(count)]
        came = Counter(each.code().name for each in running)
        ended.set()
    return came


def _nothing(ended: threading.Event) -> Iterator[pb.LoadRequest]:
    ended.wait(SECONDS)
    yield from ()


# --- connections


def idle_connections(victim: Victim, count: int = 64) -> Outcome:
    """Connections to the gRPC port that say nothing."""
    return _held(victim, count, b"")


def half_handshakes(victim: Victim, count: int = 64) -> Outcome:
    """TLS handshakes, or HTTP/2 where there is no TLS, that begin and do not go on."""
    return _held(victim, count, _CLIENT_HELLO if Address.parse(victim.url).tls else _PREFACE[:10])


def _held(victim: Victim, count: int, said: bytes) -> Outcome:
    came: Outcome = Counter()
    with contextlib.ExitStack() as held:
        for _ in range(count):
            try:
                held.enter_context(connected(victim)).sendall(said)
                came["opened"] += 1
            except OSError as error:
                came[type(error).__name__] += 1
        time.sleep(HELD_SECONDS)
    return came


def resets(victim: Victim, count: int = 2000) -> Outcome:
    """Calls on one connection, each reset as soon as it is made."""
    cancel = struct.pack(">I", _CANCEL)
    came: Outcome = Counter()
    try:
        with greeted(victim) as connection:
            for stream in range(1, 2 * count, 2):
                connection.sendall(opened_call("Match", stream) + frame(_RESET, 0, stream, cancel))
                came["reset"] += 1
    except OSError as error:  # the daemon hung up, as it may
        came[type(error).__name__] += 1
    return came


def greeted(victim: Victim) -> socket.socket:
    """A connection on which HTTP/2 has begun."""
    connection = connected(victim)
    try:
        connection.sendall(_PREFACE + frame(_SETTINGS, 0, 0) + frame(_SETTINGS, _ACK, 0))
    except OSError:
        connection.close()
        raise
    return connection


def opened_call(verb: str, stream: int, **headers: str) -> bytes:
    """A call that has begun, and says nothing yet. ``stream`` is odd, and greater than the last."""
    return frame(_HEADERS, _END_HEADERS, stream, _headers(f"/{wire.SERVICE}/{verb}", headers))


def message(body: pb.LoadRequest, stream: int) -> bytes:
    """What a call says, and that more will follow."""
    data = body.SerializeToString()
    return frame(_DATA, 0, stream, b"\x00" + struct.pack(">I", len(data)) + data)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _headers(path: str, more: Mapping[str, str]) -> bytes:
    """The headers of a call in HPACK, none of them indexed."""
    given = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
        **more,
    }
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in given.items())


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


# --- the HTTP port


def idle_http(victim: Victim, count: int = 64) -> Outcome:
    """Connections to the HTTP port that ask for nothing."""
    return _asked(victim, count, [b""])


def slow_http(victim: Victim, count: int = 8) -> Outcome:
    """Requests that come a byte at a time and never end."""
    return _asked(victim, count, [bytes([byte]) for byte in b"GET / HTTP/1.1\r\nX: " + b"y" * 200])


def endless_headers(victim: Victim, count: int = 8) -> Outcome:
    """Requests with more headers than anybody reads."""
    return _asked(victim, count, [b"GET / HTTP/1.1\r\n" + b"X-Header: value\r\n" * 10_000])


def strange_hosts(victim: Victim, count: int = 8) -> Outcome:
    """Requests by a name that is not the daemon's: what a page of a stranger makes a browser send."""
    return _asked(victim, count, [b"GET /status.json HTTP/1.1\r\nHost: evil.example\r\n\r\n"], answer=True)


def _asked(victim: Victim, count: int, pieces: list[bytes], *, answer: bool = False) -> Outcome:
    came: Outcome = Counter()
    if not victim.page:
        return came
    at = urlsplit(victim.page)
    with contextlib.ExitStack() as held:
        opened = []
        for _ in range(count):
            try:
                made = socket.create_connection((at.hostname or "", at.port or 0), SECONDS)
                opened.append(held.enter_context(made))
            except OSError as error:
                came[type(error).__name__] += 1
        for piece in pieces:
            for connection in opened:
                with contextlib.suppress(OSError):  # it was hung up on, as it should be
                    connection.sendall(piece)
        for connection in opened:
            came[_status(connection) if answer else "opened"] += 1
        if not answer:
            time.sleep(HELD_SECONDS)
    return came


def _status(connection: socket.socket) -> str:
    try:
        return connection.recv(64).split(b"\r\n")[0].decode(errors="replace") or "closed"
    except OSError as error:
        return type(error).__name__


# --- where


def _target(victim: Victim) -> str:
    return Address.parse(victim.url).target


def connected(victim: Victim) -> socket.socket:
    address = Address.parse(victim.url)
    if not address.path:
        return socket.create_connection((address.bare_host, address.port), SECONDS)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(SECONDS)
    connection.connect(address.path)
    return connection


BURSTS: Mapping[str, Burst] = {
    burst.__name__: burst
    for burst in (
        bombs,
        marks,
        babble,
        silent_loads,
        idle_connections,
        half_handshakes,
        resets,
        idle_http,
        slow_http,
        endless_headers,
        strange_hosts,
    )
}
