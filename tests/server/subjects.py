"""A real daemon in a process of its own as a subject of the shipped suites."""

from __future__ import annotations

import tempfile
from pathlib import Path

import kvstore
from kvstore.checking import check
from kvstore.client import Client
from kvstore.testing.subjects import DISK_BYTES, HOST_BYTES
from server.commands.daemon import Operator
from tests.server.conftest import DEADLINE, DaemonProcess, Fleet


class DaemonSubject:
    """A daemon whose client maps the arena, cannot get at it, or comes over TCP."""

    def __init__(self, path: Path, mode: str, payloads: str, *, disk_bytes: int = DISK_BYTES) -> None:
        self._mode = mode
        self._sockets = tempfile.TemporaryDirectory(prefix="latentkv-")  # a socket's path must be short
        listen = "127.0.0.1:0" if mode == "tcp-bytes" else f"unix://{self._sockets.name}/kv.sock"
        settings = {
            "data": path / "data",
            "listen": listen,
            "host-bytes": HOST_BYTES,
            "disk-bytes": disk_bytes,
            "interval": 0,
            "lease-seconds": 3600,
            "drain-seconds": 20,
            "payloads": payloads,
        }
        self.path = path / "data"
        self._fleet = Fleet()
        flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        self.daemon: DaemonProcess = self._fleet.daemon(*flags)
        self.store: Client = self._connect()

    def _connect(self) -> Client:
        if self._mode == "unix-bytes":
            self.daemon.arena_socket.unlink()
        return kvstore.connect(self.daemon.url, timeout=DEADLINE)

    def restart(self) -> None:
        self.store.close()
        assert self.daemon.term() == 0
        self.daemon.start()
        self.store = self._connect()

    def delete(self, unit: bytes) -> None:
        with Operator(self.daemon.url) as daemon:
            daemon.delete("unit", unit.hex())

    def expire(self) -> None:
        pass  # its clock is its own

    def faults(self) -> list[str]:
        return []  # its tables can't be seen from here

    def close(self) -> list[str]:
        self.store.close()
        assert self.daemon.term() == 0
        self._fleet.close()
        self._sockets.cleanup()
        return [f"{fault.kind} {fault.subject}: {fault.detail}" for fault in check(self.path).faults]
