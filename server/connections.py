"""How many peers may be connected, for how long, and what each may do: gRPC's settings, and descriptors."""

from __future__ import annotations

import logging
import resource

from kvstore import wire
from server.events import event

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 2048  # at the gRPC port; one more is closed at once
MAX_STREAMS = 256  # calls at once on a connection; the peer keeps the others back
# Calls that have come and that the event loop has not seen yet. Beyond it gRPC cancels some, of anybody:
# at 1,000 by default, which one peer reaches that makes calls and resets them.
MAX_PENDING = 1 << 16
IDLE_SECONDS = 600.0  # without a call, after which a connection is closed; the next call opens another
DESCRIPTORS = 1 << 16  # as many as the daemon ever asks for


def options(request_seconds: float) -> tuple[tuple[str, int], ...]:
    """The settings of the gRPC server. A handshake may take ``request_seconds``."""
    return (
        ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
        ("grpc.per_message_decompression", 0),  # 8 KB of gzip may be 8 MiB: what is compressed is no message
        ("grpc.so_reuseport", 0),  # else a second daemon could listen on the same port
        ("grpc.keepalive_time_ms", 30_000),  # a peer whose host died must not hold a stream for ever
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
        ("grpc.max_allowed_incoming_connections", min(MAX_CONNECTIONS, raise_descriptors() // 2)),
        ("grpc.max_connection_idle_ms", int(IDLE_SECONDS * 1000)),
        ("grpc.server_handshake_timeout_ms", int(request_seconds * 1000)),
    )


def raise_descriptors() -> int:
    """Let this process have as many descriptors as it may; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # some sandboxes forbid it
        event(log, logging.WARNING, "descriptors_limited", limit=soft, reason=error)
        return soft
    return wanted
