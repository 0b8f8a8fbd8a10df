"""The handover socket: gives an arena's memfd to workers of this host and learns of their death.

A plain unix stream socket beside the gRPC one. A process whose uid is known gets one line of
JSON, with the memfd of its caller's domain if that may map it, and then keeps the connection open: its
end of file is the worker's death, and frees what the worker held. The token in that line also
says in gRPC calls whose they are, for gRPC does not tell the uid of a peer. It says so over the unix
socket only, and until the process that got it has ended, whoever keeps its connection open.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvstore.arena import Arena
from kvstore.errors import LimitReached
from kvstore.leases import Holder
from kvstore.wire import HANDOVER_VERSION
from server.credentials import Credentials, Evidence
from server.domains import Domain
from server.events import Occasional, event

log = logging.getLogger(__name__)

_BABBLE_BYTES = 1 << 16
_BABBLE_SECONDS = 0.05
_UCRED = struct.Struct("3i")  # pid, uid, gid


class Handover:
    """Listens on ``path``. Owned by the event loop."""

    def __init__(self, path: Path, domains: Mapping[str, Domain], credentials: Credentials) -> None:
        self._path = path
        self._credentials = credentials
        self._domains = domains
        self._troubles = Occasional(log)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connections: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Listen; ``accept`` follows. The path must be free. Raises ``OSError``."""
        self._listener.setblocking(False)
        self._listener.bind(str(self._path))
        self._listener.listen(64)

    async def accept(self) -> None:
        """Serve whoever comes, for ever."""
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError as error:  # out of descriptors: workers get bytes until some are free
                self._troubles.event(logging.ERROR, "handover_failed", reason=error.strerror)
                await asyncio.sleep(1.0)
                continue
            task = asyncio.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            pid, uid, _ = _UCRED.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            )
            caller = self._credentials.caller(Evidence(uid=uid))
            if caller is None:
                self._refuse(pid, uid, "another user")
                return
            domain = self._domains[caller.domain]
            try:
                holder = domain.workers.admit(caller, uid)
            except LimitReached as error:
                self._refuse(pid, uid, error)
                return
            name = holder.token[:4].hex()
            came = "worker_mapped" if holder.mapped else "worker_known"
            who = {"caller": caller.name, "domain": caller.domain}
            event(log, logging.INFO, came, worker=name, pid=pid, uid=uid, **who)
            try:
                with _until_end_of(pid, functools.partial(domain.workers.disown, holder)):
                    _greet(connection, holder, domain.store.arena)
                    await _end_of_file(connection)
            except OSError as error:
                event(log, logging.INFO, "worker_lost", worker=name, reason=error.strerror or error)
            domain.workers.dismiss(holder)
            event(log, logging.INFO, "worker_gone", worker=name, pid=pid)

    def _refuse(self, pid: int, uid: int, reason: object) -> None:
        self._troubles.event(logging.WARNING, "worker_refused", pid=pid, uid=uid, reason=reason)

    async def close(self) -> None:
        """Stop, keeping what connected workers hold: the store and ``accept`` must have ended by now.

        A cancelled connection is closed without being dismissed, for its worker may live
        on and touch its slots.
        """
        tasks = set(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()


def _greet(connection: socket.socket, holder: Holder, arena: Arena) -> None:
    nbytes, descriptors = (arena.nbytes, [arena.fd]) if holder.mapped else (0, [])
    hello = {"version": HANDOVER_VERSION, "worker": holder.token.hex(), "arena_bytes": nbytes}
    socket.send_fds(connection, [json.dumps(hello).encode() + b"\n"], descriptors)


async def _end_of_file(connection: socket.socket) -> None:
    # A worker has nothing to say; only its silence's end matters. One that talks is not listened to closely.
    while await asyncio.get_running_loop().sock_recv(connection, _BABBLE_BYTES):
        await asyncio.sleep(_BABBLE_SECONDS)


@contextlib.contextmanager
def _until_end_of(pid: int, ended: Callable[[], None]) -> Iterator[None]:
    """Call ``ended`` should the process end meanwhile: a child may have its connection yet."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        ended()
        yield
        return
    except OSError:  # one that we cannot see, of another container: its connection has to do
        yield
        return
    loop = asyncio.get_running_loop()

    def note() -> None:
        loop.remove_reader(process)
        ended()

    loop.add_reader(process, note)
    try:
        yield
    finally:
        loop.remove_reader(process)
        os.close(process)
