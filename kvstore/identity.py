"""Who we are to a daemon, and how we know that it is the right one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvstore.errors import InvalidArgument

_TOKEN_FILE, _CA, _CERT, _KEY = (f"LATENTKV_{name}" for name in ("TOKEN_FILE", "CA", "CERT", "KEY"))


@dataclass(frozen=True, slots=True)
class Identity:
    """A bearer token, or a certificate of our own, or neither; files are PEM.

    ``ca`` verifies the daemon's certificate; without it the authorities do that gRPC comes with. A
    process on the daemon's host needs none of this if the daemon's credentials name its uid.

    Raises ``InvalidArgument``.
    """

    token: str = field(default="", repr=False)
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidArgument(f"cert={self.cert} and key={self.key}: give both, or neither")
        if not self.token.isascii() or not self.token.isprintable() or " " in self.token:
            raise InvalidArgument("the token is no line of printable ASCII; see `latentkv token`")

    @classmethod
    def from_files(cls, token_file: str = "", ca: str = "", cert: str = "", key: str = "") -> Self:
        """From paths; an empty one is not given. Raises ``InvalidArgument``."""
        paths = {name: Path(path) for name, path in (("ca", ca), ("cert", cert), ("key", key)) if path}
        try:
            token = Path(token_file).read_text().strip() if token_file else ""
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"token_file={token_file!r} cannot be read ({error})") from None
        return cls(token, **paths)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """From the files that LATENTKV_TOKEN_FILE, _CA, _CERT and _KEY name. Raises ``InvalidArgument``."""
        return cls.from_files(*(environment.get(name, "") for name in (_TOKEN_FILE, _CA, _CERT, _KEY)))

    def read(self, name: str) -> bytes | None:
        """The bytes of ``ca``, ``cert`` or ``key``; None if it is not given. Raises ``InvalidArgument``."""
        path = {"ca": self.ca, "cert": self.cert, "key": self.key}[name]
        if path is None:
            return None
        try:
            return path.read_bytes()
        except OSError as error:
            raise InvalidArgument(f"{name}={str(path)!r} cannot be read ({error.strerror})") from None


NOBODY = Identity()
