"""What an engine's extra config says of us, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import kvstore
from kvstore.client import Client
from kvstore.errors import InvalidArgument
from kvstore.identity import Identity


@dataclass(frozen=True, slots=True)
class Settings:
    """Of every engine. Times are in seconds."""

    url: str  # of the daemon
    tenant: str = "default"
    token_file: str = ""  # what a daemon with credentials knows us by: a token,
    tls_cert: str = ""  # or a certificate
    tls_key: str = ""  # and its key
    tls_ca: str = ""  # that verifies the daemon
    revision: str = ""  # of the weights; by default a fingerprint of the checkpoint's files
    load_timeout: float = 30.0  # for each batch of a load
    store_deadline: float = 5.0  # that blocks may wait for room in the store

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """Raises ``InvalidArgument`` for an unknown or missing name, or a value of another type."""
        known = {field.name: type(field.default) for field in fields(cls)} | {"url": str}
        if unknown := sorted(set(raw) - set(known)):
            raise InvalidArgument(f"the extra config has no {', '.join(unknown)}; known: {', '.join(known)}")
        if "url" not in raw:
            raise InvalidArgument(
                'the extra config needs the url of the daemon, such as "unix:///run/latentkv/kv.sock"'
            )
        for name, value in raw.items():
            if not isinstance(value, (int, float) if known[name] is float else known[name]):
                raise InvalidArgument(f"the extra config's {name}={value!r} is no {known[name].__name__}")
        return cls(**raw)

    def connect(self, timeout: float) -> Client:
        """A client of the daemon. Raises ``InvalidArgument``."""
        identity = Identity.from_files(self.token_file, self.tls_ca, self.tls_cert, self.tls_key)
        return kvstore.connect(self.url, timeout=timeout, identity=identity)


@dataclass(frozen=True, slots=True)
class VllmSettings(Settings):
    """Of vLLM."""

    match_timeout: float = 0.5  # that a request waits for Match before it counts as a miss
