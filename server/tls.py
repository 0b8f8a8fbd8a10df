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


def server_credentials(config: Config) -> grpc.ServerCredentials:
    """What a ``tls://`` address is served with. Raises ``ConfigError``.

    With ``tls_client_ca`` every client must have a certificate of it.
    """
    if config.tls_cert is None or config.tls_key is None:
        raise ConfigError(f"listen={config.address!r} needs tls_cert and tls_key")
    named = {
        "tls_cert": config.tls_cert,
        "tls_key": config.tls_key,
        "tls_client_ca": config.tls_client_ca,
    }
    files = {setting: _read(setting, path) for setting, path in named.items() if path is not None}
    if files["tls_key"].open_to_all:
        event(log, logging.WARNING, "tls_key_readable", file=config.tls_key, reason="all may; chmod go-r it")
    authority = files.get("tls_client_ca")
    _verify(config.tls_cert, config.tls_key, config.tls_client_ca)
    return grpc.ssl_server_credentials(
        [(files["tls_key"].data, files["tls_cert"].data)],
        root_certificates=authority.data if authority else None,
        require_client_auth=authority is not None,
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
