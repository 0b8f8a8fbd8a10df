"""The daemon's certificate, and the authority that its clients' certificates come from."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from server.config import Config, ConfigError


def server_credentials(config: Config) -> grpc.ServerCredentials:
    """What a ``tls://`` address is served with. Raises ``ConfigError``.

    With ``tls_client_ca`` every client must have a certificate of it.
    """
    if config.tls_cert is None or config.tls_key is None:
        raise ConfigError(f"listen={config.address!r} needs tls_cert and tls_key")
    authority = config.tls_client_ca
    _verify(config.tls_cert, config.tls_key, authority)
    return grpc.ssl_server_credentials(
        [(config.tls_key.read_bytes(), config.tls_cert.read_bytes())],
        root_certificates=authority.read_bytes() if authority else None,
        require_client_auth=authority is not None,
    )


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
