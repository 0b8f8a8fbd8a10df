"""Where a daemon is reached: ``unix:///path``, ``host:port``, or ``tls://host:port``."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from typing import Self
from urllib.parse import quote

UNIX = "unix://"
TLS = "tls://"
ARENA_SUFFIX = ".arena"  # of the handover socket, which lies beside the one for calls
MAX_SOCKET_PATH = 107 - len(ARENA_SUFFIX)  # sun_path holds 108 bytes with its final zero


@dataclass(frozen=True, slots=True)
class Address:
    """A socket's path, or a host and a port, spoken to with TLS or without."""

    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises ``ValueError`` that says what to write instead."""
        if url.startswith(UNIX):
            return cls(path=_socket_path(url.removeprefix(UNIX)))
        host, separator, port = url.removeprefix(TLS).rpartition(":")
        wrong = not separator or not host or "/" in host or "@" in host
        if wrong or not port.isdecimal() or int(port) > 65535:
            raise ValueError("write unix:///path, host:port or tls://host:port")
        return cls(host=host, port=int(port), tls=url.startswith(TLS))

    @property
    def target(self) -> str:
        """As gRPC names it: a path as in a URL, where ``%41`` would mean A."""
        return f"unix:{quote(os.fsencode(self.path))}" if self.path else f"{self.host}:{self.port}"

    @property
    def bare_host(self) -> str:
        """The host without the brackets of IPv6."""
        return self.host.strip("[]")

    @property
    def local(self) -> bool:
        """Whether what is sent there stays on this machine."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.bare_host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path:
            return UNIX + self.path
        return f"{TLS if self.tls else ''}{self.target}"


def _socket_path(path: str) -> str:
    """Absolute, with ``~`` as the home directory. Raises ``ValueError``."""
    home = os.path.expanduser(path)
    if not home.startswith("/"):
        raise ValueError("the socket's path must be absolute, or begin with the ~ of a user: unix:///path")
    if "\0" in home:
        raise ValueError("no path can hold a zero byte")
    if len(os.fsencode(home)) > MAX_SOCKET_PATH:
        raise ValueError(f"the socket's path is longer than {MAX_SOCKET_PATH} bytes; choose a shorter one")
    return home
