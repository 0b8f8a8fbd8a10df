"""A daemon's life: start up, serve until a signal, drain, shut down."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import stat
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import ByteSize

from kvstore import wire
from kvstore.address import UNIX, Address
from kvstore.errors import KVStoreError
from kvstore.observer import Observer
from kvstore.settings import StoreSettings
from kvstore.store import Store
from server.access import Identifying
from server.background import Background
from server.config import ARENA_SUFFIX, Config
from server.credentials import DEFAULT_DOMAIN, CredentialFile, Credentials, CredentialsError, Unguarded
from server.decoding import Decoding
from server.domains import Domain, add_services
from server.events import event
from server.faults import FaultLog
from server.handover import Handover
from server.health import Health
from server.operators import OPERATOR
from server.pages import Pages
from server.reporter import Reporter
from server.tls import server_credentials
from server.web import WebServer

log = logging.getLogger(__name__)

_STREAM_GRACE = 2.0  # seconds in which calls that are running may end by themselves
_GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # else a second daemon could listen on the same port
    ("grpc.keepalive_time_ms", 30_000),  # a peer whose host died must not hold a stream for ever
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class AddressInUse(KVStoreError):
    """Another process listens on the address."""


OpenStore = Callable[[StoreSettings, Observer], Awaitable[Store]]


async def open_store(settings: StoreSettings, observer: Observer) -> Store:
    """A store of a daemon. Raises as ``Store.open``."""
    return await Store.open(settings, observer=observer)


class Daemon:
    """A store for each domain behind one gRPC server, and a handover socket if that is a unix socket."""

    def __init__(self, config: Config, open_store: OpenStore = open_store) -> None:
        self._config = config
        self._open_store = open_store
        self._address = config.address
        self._credentials: Credentials = Unguarded()
        self._health = Health()
        self._faults = FaultLog()
        self._stores = config.stores()
        self._reporters = {name: Reporter(name, config, self._health, self._faults) for name in self._stores}
        self._domains: dict[str, Domain] = {}  # that are open
        self._pages = Pages(self._health, self._reporters)
        self._web: WebServer | None = None
        self._stop = asyncio.Event()
        self._sockets: list[Path] = []
        self._handover: Handover | None = None
        self._background = Background(
            self._domains,
            self._reporters,
            self._health,
            self._stop.set,
            sweep_seconds=config.lease_seconds / 4,
        )

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises ``KVStoreError`` when it cannot start, or had to end.

        SIGHUP reads the credentials again.
        """
        self._catch_signals()
        self._open_credentials()
        self._tls = server_credentials(self._config) if Address.parse(self._address).tls else None
        logging.getLogger().addHandler(self._faults)
        await self._startup()
        try:
            await self._stop.wait()
        finally:
            await self._drain()
            await self._shutdown()
        self._background.require_sound()

    def _catch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)

    def _open_credentials(self) -> None:
        """Raises ``CredentialsError``."""
        if self._config.credentials is None:
            return
        file = self._credentials = CredentialFile(self._config.credentials, tuple(self._stores))

        def reload() -> None:
            try:
                file.reload()
            except CredentialsError as error:  # what was known stays in force
                event(log, logging.ERROR, "credentials_refused", reason=error)
            else:
                event(log, logging.INFO, "credentials_read", file=self._config.credentials, count=len(file))

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)

    async def _startup(self) -> None:
        os.umask(0o077)  # sockets and data are for this user alone
        # First, so that a daemon that takes long to start can say so.
        self._web = self._open_web()
        try:
            await self._open_domains()
        except BaseException:
            await self._close()
            raise
        try:
            self._claim_sockets()
            await self._listen()
        except BaseException:
            await self._shutdown()
            raise
        self._background.start(self._web, self._handover)
        self._announce()

    async def _open_domains(self) -> None:
        for name, settings in self._stores.items():
            reporter = self._reporters[name]
            store = await self._open_store(settings, reporter.tally)
            self._domains[name] = Domain(store, reporter, self._config)

    def _open_web(self) -> WebServer | None:
        if self._config.http is None:
            return None
        try:
            return WebServer(self._config.http, self._pages.routes())
        except OSError as error:
            raise AddressInUse(
                f"http={self._config.http!r} cannot be bound ({error.strerror}); choose another --http"
            ) from None

    def _claim_sockets(self) -> None:
        if not self._address.startswith(UNIX):
            return
        path = Path(self._address.removeprefix(UNIX))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (path, path.with_name(path.name + ARENA_SUFFIX)):
            remove_stale_socket(each)
            self._sockets.append(each)

    async def _listen(self) -> None:
        workers = [domain.workers for domain in self._domains.values()]
        # Who is refused may be nobody's: it is counted with the first domain.
        known = Identifying(self._credentials, workers, self._reporters[DEFAULT_DOMAIN].tally)
        self._server = grpc.aio.server(interceptors=[known, Decoding()], options=_GRPC_OPTIONS)
        add_services(self._domains, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._server)
        reflection.enable_server_reflection(
            (wire.SERVICE, OPERATOR, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        if self._sockets:
            # Before gRPC listens, so that whoever finds the daemon also finds its arena.
            self._handover = Handover(self._sockets[1], self._domains, self._credentials)
            self._handover.start()
        self._address = self._bind(Address.parse(self._address))
        if self._config.credentials:
            for path in self._sockets:
                path.chmod(0o666)  # credentials say who is served, and the directory who gets as far
        await self._server.start()
        for domain in self._domains.values():
            domain.reporter.serve(domain.store, self._address)
        await self._health.serve()

    def _bind(self, address: Address) -> str:
        """Bind; the address with the port that was chosen. Raises ``AddressInUse``."""
        if address.path:
            self._server.add_insecure_port(address.target)
            return str(address)
        try:
            # gRPC's own failure would also print a line of its own.
            family = socket.AF_INET6 if address.host.startswith("[") else socket.AF_INET
            socket.create_server((address.bare_host, address.port), family=family).close()
            if self._tls is None:
                port = self._server.add_insecure_port(address.target)
            else:
                port = self._server.add_secure_port(address.target, self._tls)
            return str(replace(address, port=port))
        except (OSError, RuntimeError) as error:
            raise AddressInUse(
                f"listen={str(address)!r} cannot be bound ({error}); choose another --listen"
            ) from None

    def _announce(self) -> None:
        page, data = self._web.url if self._web else "off", self._config.data
        event(log, logging.INFO, "serving", address=self._address, data=data, pid=os.getpid(), http=page)
        first, *others = (self._described(name) for name in self._domains)
        also = "".join(f"; {sizes}" for sizes in others)
        print(f"latentkv: serving on {self._address} (data {data}, http {page}, {first}{also})", flush=True)

    def _described(self, name: str) -> str:
        status, settings = self._domains[name].store.status(), self._stores[name]
        host, disk = (
            ByteSize(size).human_readable(separator=" ")
            for size in (settings.host_bytes, settings.disk_bytes)
        )
        which = "" if name == DEFAULT_DOMAIN else f"domain {name}: "
        pinned = "yes" if status.pinned else "no"
        held = f"{status.disk.blocks} blocks, {status.units} units"
        return f"{which}host {host} pinned={pinned}, disk {disk}, {held}"

    async def _drain(self) -> None:
        event(log, logging.INFO, "draining", deadline=self._config.drain_seconds)
        await self._health.drain()
        for domain in self._domains.values():
            domain.calls.drain()
        await self._server.stop(min(_STREAM_GRACE, self._config.drain_seconds))

    async def _shutdown(self) -> None:
        await self._background.close()
        await self._close()
        if self._handover:
            await self._handover.close()
        for path in self._sockets:
            path.unlink(missing_ok=True)
        event(log, logging.INFO, "stopped", address=self._address)

    async def _close(self) -> None:
        closing = (domain.store.close() for domain in self._domains.values())  # all within one deadline
        ends = await asyncio.gather(*closing, return_exceptions=True)
        if self._web:
            await self._web.close()
        for end in ends:
            if isinstance(end, BaseException):
                raise end


def remove_stale_socket(path: Path) -> None:
    """Remove the socket of a daemon that died. Raises ``AddressInUse`` for anything else that is there."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise AddressInUse(f"{path} exists and is no socket; choose another --listen")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
                raise AddressInUse(
                    f"another daemon listens on {path}; choose another --listen, or stop that one"
                )
        path.unlink()
