"""Where a daemon is reached: ``unix:///path``, ``host:port``, or ``tls://host:port``."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Self

UNIX = "unix://"
TLS = "tls://"


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
            path = url.removeprefix(UNIX)
            if not path.startswith("/"):
                raise ValueError("the socket's path must be absolute: unix:///path")
            return cls(path=path)
        host, separator, port = url.removeprefix(TLS).rpartition(":")
        wrong = not separator or not host or "/" in host or "@" in host
        if wrong or not port.isdecimal() or int(port) > 65535:
            raise ValueError("write unix:///path, host:port or tls://host:port")
        return cls(host=host, port=int(port), tls=url.startswith(TLS))

    @property
    def target(self) -> str:
        """As gRPC names it."""
        return f"unix:{self.path}" if self.path else f"{self.host}:{self.port}"

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
