"""A daemon's life: start up, serve until a signal, drain, shut down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import ByteSize

from kvstore import wire
from kvstore.address import Address
from kvstore.observer import Observer
from kvstore.settings import StoreSettings
from kvstore.showing import escaped
from kvstore.store import Store
from server import connections
from server.access import Identifying
from server.background import Background
from server.config import Config, ConfigError
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
from server.signals import Signals
from server.sockets import AddressUnusable, Bound, SocketNames, require_bindable, unbindable
from server.standard import STDOUT, write
from server.tls import Certificate
from server.web import WebServer

log = logging.getLogger(__name__)

_STREAM_GRACE = 2.0  # seconds in which calls that are running may end by themselves


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
        self._file: CredentialFile | None = None
        self._certificate: Certificate | None = None
        self._health = Health()
        self._faults = FaultLog()
        self._stores = config.stores()
        self._reporters = {name: Reporter(name, config, self._health, self._faults) for name in self._stores}
        self._domains: dict[str, Domain] = {}  # that are open
        self._pages = Pages(self._health, self._reporters)
        self._web: WebServer | None = None
        self._stop = asyncio.Event()
        self._names: SocketNames | None = None
        self._handover: Handover | None = None
        self._server: grpc.aio.Server | None = None
        self._background = Background(
            self._domains,
            self._reporters,
            self._health,
            self._stop.set,
            sweep_seconds=config.lease_seconds / 4,
        )

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises ``KVStoreError`` when it cannot start, or had to end.

        SIGHUP reads the credentials and the certificate again. What goes wrong at the end is logged,
        keeps nothing else from ending, and is raised once all is done.
        """
        Signals(self._asked_to_stop, self._read_again, self._pass_over).catch()
        if self._config.credentials is not None:
            self._file = CredentialFile(self._config.credentials, tuple(self._stores))
            self._credentials = self._file
        if Address.parse(self._address).tls:
            self._certificate = Certificate(self._config)
        logging.getLogger().addHandler(self._faults)
        async with contextlib.AsyncExitStack() as ends:
            ends.callback(logging.getLogger().removeHandler, self._faults)
            ends.push_async_callback(self._end)
            await self._startup()
            await self._stop.wait()
        self._background.require_sound()

    def _asked_to_stop(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            # To lose what is unwritten takes a SIGKILL: a second Ctrl-C is often an impatient first one.
            left = self._config.drain_seconds
            event(log, logging.INFO, "stopping_already", signal=number.name, deadline=left)
            return
        event(log, logging.INFO, "stopping", signal=number.name)
        self._stop.set()

    def _pass_over(self, number: signal.Signals) -> None:
        event(log, logging.INFO, "signal_ignored", signal=number.name)

    def _read_again(self) -> None:
        """Read everything that may have changed; of what is wrong now, what was known stays in force."""
        if self._file is not None:
            try:
                self._file.reload()
            except CredentialsError as error:
                event(log, logging.ERROR, "credentials_refused", reason=error)
            else:
                read = {"file": self._config.credentials, "count": len(self._file)}
                event(log, logging.INFO, "credentials_read", **read)
        if self._certificate is not None:
            try:
                self._certificate.reload()
            except ConfigError as error:
                event(log, logging.ERROR, "certificate_refused", reason=error)
            else:
                event(log, logging.INFO, "certificate_read", file=self._certificate.file)
        if self._file is None and self._certificate is None:
            event(log, logging.INFO, "nothing_to_read_again", reason="no credentials and no certificate")

    async def _startup(self) -> None:
        os.umask(0o077)  # sockets and data are for this user alone
        # First, so that a daemon that takes long to start can say so.
        self._web = self._open_web()
        await self._open_domains()
        if self._stop.is_set():  # meanwhile: nobody has found us yet
            return
        await self._listen()
        self._background.start(self._web, self._handover)
        self._announce()

    async def _open_domains(self) -> None:
        for name, settings in self._stores.items():
            if self._stop.is_set():
                return
            reporter = self._reporters[name]
            store = await self._open_store(settings, reporter.tally)
            self._domains[name] = Domain(store, reporter, self._config)

    def _open_web(self) -> WebServer | None:
        if self._config.http is None:
            return None
        try:
            return WebServer(
                self._config.http,
                self._pages.routes(),
                hosts=self._config.http_hosts,
                seconds=self._config.request_seconds,
            )
        except OSError as error:
            raise unbindable("http", self._config.http, error) from None

    async def _listen(self) -> None:
        workers = [domain.workers for domain in self._domains.values()]
        # Who is refused may be nobody's: it is counted with the first domain.
        known = Identifying(self._credentials, workers, self._reporters[DEFAULT_DOMAIN].tally)
        tallies = {name: reporter.tally for name, reporter in self._reporters.items()}
        decoding = Decoding(tallies, self._config.request_seconds)
        self._server = grpc.aio.server(
            interceptors=[known, decoding], options=connections.options(self._config.request_seconds)
        )
        add_services(self._domains, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._server)
        reflection.enable_server_reflection(
            (wire.SERVICE, OPERATOR, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self._address = self._bind(Address.parse(self._address))
        await self._server.start()
        for domain in self._domains.values():
            domain.reporter.serve(domain.store, self._address)
        await self._health.serve()

    def _bind(self, address: Address) -> str:
        """Bind; the address with the port that was chosen. Raises ``AddressUnusable``."""
        assert self._server is not None
        if address.path:
            self._names = SocketNames(Path(address.path))
            with self._names.taking() as bound:
                self._bind_sockets(self._server, bound)
            return str(address)
        require_bindable(address)
        try:
            if self._certificate is None:
                port = self._server.add_insecure_port(address.target)
            else:
                port = self._server.add_secure_port(address.target, self._certificate.credentials())
        except RuntimeError as error:  # somebody was faster, or it is something that gRPC does not say
            raise AddressUnusable(f"listen={str(address)!r} cannot be bound ({error}): try again") from None
        return str(replace(address, port=port))

    def _bind_sockets(self, server: grpc.aio.Server, bound: Bound) -> None:
        self._handover = Handover(bound.arena, self._domains, self._credentials)
        self._handover.start()
        server.add_insecure_port(Address(path=str(bound.calls)).target)
        if self._config.credentials:
            for path in (bound.arena, bound.calls):
                path.chmod(0o666)  # credentials say who is served, and the directory who gets as far

    def _announce(self) -> None:
        page, data = self._web.url if self._web else "off", self._config.data
        event(log, logging.INFO, "serving", address=self._address, data=data, pid=os.getpid(), http=page)
        first, *others = (self._described(name) for name in self._domains)
        also = "".join(f"; {sizes}" for sizes in others)
        where = f"{self._address} (data {data}, http {page}"
        if not write(STDOUT, escaped(f"latentkv: serving on {where}, {first}{also})") + "\n"):
            event(log, logging.WARNING, "ready_line_lost", reason="standard output cannot be written")

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

    async def _end(self) -> None:
        """Undo what was done of the start; each step is taken, whatever those before it raised."""
        served = self._health.ready
        async with contextlib.AsyncExitStack() as steps:
            for step in reversed(
                (
                    self._refuse_calls,
                    self._end_calls,
                    self._end_tasks,
                    self._close_stores,
                    self._close_handover,
                    self._release_sockets,
                    self._close_web,
                )
            ):
                steps.push_async_callback(_logged, step)
        if served:
            event(log, logging.INFO, "stopped", address=self._address)

    async def _refuse_calls(self) -> None:
        if self._health.ready:
            event(log, logging.INFO, "draining", deadline=self._config.drain_seconds)
        for domain in self._domains.values():
            domain.calls.drain()
        await self._health.drain()

    async def _end_calls(self) -> None:
        if self._server is not None:
            await self._server.stop(min(_STREAM_GRACE, self._config.drain_seconds))

    async def _end_tasks(self) -> None:
        await self._background.close()

    async def _close_stores(self) -> None:
        """All within one deadline. Raises what the first of those that failed did."""
        closing = {name: domain.store.close() for name, domain in self._domains.items()}
        ends = await asyncio.gather(*closing.values(), return_exceptions=True)
        failed = {
            name: end for name, end in zip(closing, ends, strict=True) if isinstance(end, BaseException)
        }
        for name, error in failed.items():
            event(log, logging.ERROR, "store_close_failed", domain=name, reason=error)
        for error in failed.values():
            raise error

    async def _close_handover(self) -> None:
        if self._handover is not None:
            await self._handover.close()

    async def _release_sockets(self) -> None:
        if self._names is not None:
            self._names.release()

    async def _close_web(self) -> None:
        if self._web is not None:
            await self._web.close()


async def _logged(step: Callable[[], Awaitable[None]]) -> None:
    """Take a step of the end. Raises what it raises."""
    try:
        await step()
    except BaseException as error:
        event(log, logging.ERROR, "end_failed", step=step.__name__, reason=error)
        raise
