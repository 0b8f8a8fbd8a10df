"""The daemon's certificate, and the authority that its clients' certificates come from."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import grpc

from server.config import Config, ConfigError
from server.events import event
from server.trusted_files import TrustedFile, UntrustedFile, read_trusted

log = logging.getLogger(__name__)


class Certificate:
    """What a ``tls://`` address is served with. With ``tls_client_ca`` every client must have one of it."""

    def __init__(self, config: Config) -> None:
        """Raises ``ConfigError``."""
        if config.tls_cert is None or config.tls_key is None:
            raise ConfigError(f"listen={config.address!r} needs tls_cert and tls_key")
        self._cert, self._key, self._authority = config.tls_cert, config.tls_key, config.tls_client_ca
        self._known = self._read()
        self._fresh: grpc.ServerCertificateConfiguration | None = None  # until gRPC has taken it

    @property
    def file(self) -> Path:
        """Where the certificate lies."""
        return self._cert

    def reload(self) -> None:
        """Read the files again, for the handshakes to come. Raises ``ConfigError``; then nothing changes."""
        self._fresh = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC, which asks with each handshake whether there is another certificate."""
        return grpc.dynamic_ssl_server_credentials(
            self._known,
            self._next,  # type: ignore[arg-type]  # the stubs do not know that None is "as before"
            require_client_authentication=self._authority is not None,
        )

    def _next(self) -> grpc.ServerCertificateConfiguration | None:
        fresh, self._fresh = self._fresh, None
        return fresh

    def _read(self) -> grpc.ServerCertificateConfiguration:
        named = {"tls_cert": self._cert, "tls_key": self._key, "tls_client_ca": self._authority}
        files = {setting: _read(setting, path) for setting, path in named.items() if path is not None}
        if files["tls_key"].open_to_all:
            event(log, logging.WARNING, "tls_key_readable", file=self._key, reason="all may; chmod go-r it")
        _verify(self._cert, self._key, self._authority)
        authority = files.get("tls_client_ca")
        return grpc.ssl_server_certificate_configuration(
            [(files["tls_key"].data, files["tls_cert"].data)],
            root_certificates=authority.data if authority else None,
        )


def _read(setting: str, path: Path) -> TrustedFile:
    try:
        return read_trusted(path)
    except UntrustedFile as error:
        raise ConfigError(f"{setting}: {error}") from None


def _verify(cert: Path, key: Path, authority: Path | None) -> None:
    """Whether the files are what they should be: gRPC would only say that it cannot bind."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # an encrypted key must not ask a terminal
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls_cert={str(cert)!r} and tls_key={str(key)!r} are no certificate and its key in PEM ({error})"
        ) from None
    try:
        if authority is not None:
            context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls_client_ca={str(authority)!r} has no certificates in PEM ({error})") from None
