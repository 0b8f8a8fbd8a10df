"""TLS: beyond loopback nothing else is spoken, and both sides may know each other by certificates."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

import kvstore
from kvstore.api import MissReason
from kvstore.client import Client
from kvstore.errors import NotCovered, Unauthenticated, Unavailable
from kvstore.identity import Identity
from kvstore.namespace import Namespace
from server.commands.daemon import Operator
from server.config import ConfigError, load
from server.credentials import hash_of, new_token
from server.lifecycle import Daemon
from tests.server.conftest import DEADLINE, SMALL, DaemonProcess, Fleet, document, flag_maker
from tests.server.test_tenants import entry

REQUEST_SECONDS = 2.0
SOON = 0.5  # for a call that must fail


@dataclass
class Authority:
    """An authority of certificates, and the files that it made."""

    path: Path
    made: trustme.CA

    @classmethod
    def of(cls, path: Path) -> Authority:
        path.mkdir()
        made = trustme.CA()
        made.cert_pem.write_to_path(str(path / "ca.pem"))
        return cls(path, made)

    @property
    def ca(self) -> Path:
        return self.path / "ca.pem"

    def issue(self, *names: str, common_name: str | None = None) -> tuple[Path, Path]:
        """Certificate and key for these names."""
        issued = self.made.issue_cert(*names, common_name=common_name)
        cert, key = (self.path / f"{names[0]}.{kind}.pem" for kind in ("cert", "key"))
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return cert, key


@dataclass
class Secured:
    """Two daemons with TLS: one asks for tokens, one for certificates."""

    fleet: Fleet
    ours: Authority
    others: Authority
    token: str
    by_token: DaemonProcess
    by_certificate: DaemonProcess

    def port(self, daemon: DaemonProcess) -> str:
        return daemon.url.rpartition(":")[2]

    def connect(self, daemon: DaemonProcess, identity: Identity | None, *, plain: bool = False) -> Client:
        url = f"{'' if plain else 'tls://'}localhost:{self.port(daemon)}"
        client = kvstore.connect(url, timeout=DEADLINE if identity else SOON, identity=identity)
        self.fleet.clients.append(client)
        return client


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    path = tmp_path_factory.mktemp("tls")
    ours, others = Authority.of(path / "ours"), Authority.of(path / "others")
    cert, key = ours.issue("localhost")
    token = new_token()
    file = path / "credentials.toml"
    file.write_text(
        entry("engine", f"token_sha256 = '{hash_of(token)}'", ["search"])
        + entry("rack", "certificate = 'rack-7.example'", ["search"])
        + entry("ops", "certificate = 'ops.example'", ["*"], "operator = true")
        + entry("address", "certificate = '10.9.8.7'", ["search"])
        + entry("mail", "certificate = 'someone@rack.example'", ["search"])
        + entry("common", "certificate = 'common-name.example'", ["search"])
    )
    common: dict[str, object] = {"credentials": file, "tls_cert": cert, "tls_key": key, "log_level": "debug"}
    common["request_seconds"] = REQUEST_SECONDS
    fleet = Fleet()
    with flag_maker() as first, flag_maker() as second:
        by_token = fleet.daemon(*first("tls://0.0.0.0:0", **common))  # beyond loopback
        by_certificate = fleet.daemon(*second("tls://127.0.0.1:0", tls_client_ca=ours.ca, **common))
        yield Secured(fleet, ours, others, token, by_token, by_certificate)
        fleet.close()


def test_a_token_goes_over_tls_and_blocks_come_back(
    secured: Secured, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        client = secured.connect(secured.by_token, Identity(secured.token, ca=secured.ours.ca))
        doc = document(client, 3, tenant="search")
        doc.store(client)
        assert doc.load(client) == 3
        with pytest.raises(NotCovered):
            client.open_namespace(Namespace(SMALL, tenant="chat"))
    assert secured.by_token.url.startswith("tls://0.0.0.0:")
    assert secured.token not in caplog.text + "".join(secured.by_token.log)


def test_a_certificate_is_a_credential_by_its_name(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = secured.ours.issue("rack-7.example")
    client = secured.connect(secured.by_certificate, Identity(ca=secured.ours.ca, cert=cert, key=key))
    doc = document(client, 3, tenant="search")
    doc.store(client)
    assert doc.load(client) == 3
    with pytest.raises(NotCovered):
        client.open_namespace(Namespace(SMALL, tenant="chat"))
    cert, key = secured.ours.issue("ops.example")
    for name, file in (("CA", secured.ours.ca), ("CERT", cert), ("KEY", key)):
        monkeypatch.setenv(f"LATENTKV_{name}", str(file))
    with Operator(f"tls://localhost:{secured.port(secured.by_certificate)}") as daemon:
        assert [each["tenant"] for each in daemon.report()["namespaces"]] == ["search"]


def test_a_certificate_that_nothing_names_is_nobody(secured: Secured) -> None:
    cert, key = secured.ours.issue("rack-8.example")
    client = secured.connect(secured.by_certificate, Identity(ca=secured.ours.ca, cert=cert, key=key))
    with pytest.raises(Unauthenticated):
        client.open_namespace(Namespace(SMALL, tenant="search"))


@pytest.mark.parametrize("name", ["10.9.8.7", "someone@rack.example"])
def test_only_a_dns_name_of_a_certificate_is_a_credential(secured: Secured, name: str) -> None:
    cert, key = secured.ours.issue(name, common_name="common-name.example")
    client = secured.connect(secured.by_certificate, Identity(ca=secured.ours.ca, cert=cert, key=key))
    with pytest.raises(Unauthenticated):
        client.open_namespace(Namespace(SMALL, tenant="search"))


@pytest.mark.parametrize(
    "said", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], ids=["silent", "half a hello"]
)
def test_a_handshake_that_does_not_go_on_is_hung_up_on(secured: Secured, said: bytes) -> None:
    with socket.create_connection(("localhost", int(secured.port(secured.by_token))), DEADLINE) as slow:
        slow.sendall(said)
        assert slow.recv(1) == b""


def test_handshakes_that_fail_are_not_told_of_one_by_one(secured: Secured) -> None:
    before = len(secured.by_token.log)
    for _ in range(30):
        with socket.create_connection(("localhost", int(secured.port(secured.by_token))), DEADLINE) as rude:
            rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while rude.recv(1 << 10):
                    pass
    assert len(secured.by_token.log) - before < 15


def stranger(secured: Secured) -> dict[str, tuple[DaemonProcess, Identity | None, bool]]:
    """Who gets no connection: daemon, identity, and whether without TLS."""
    cert, key = secured.others.issue("rack-7.example")
    ours = secured.ours.ca
    return {
        "another's daemon": (secured.by_token, Identity(secured.token, ca=secured.others.ca), False),
        "no authority": (secured.by_token, None, False),
        "another's certificate": (secured.by_certificate, Identity(ca=ours, cert=cert, key=key), False),
        "no certificate": (secured.by_certificate, Identity(ca=ours), False),
        "no TLS": (secured.by_token, None, True),
    }


@pytest.mark.parametrize(
    "who", ["another's daemon", "no authority", "another's certificate", "no certificate", "no TLS"]
)
def test_without_a_certificate_that_the_other_side_trusts_there_is_no_call(
    secured: Secured, who: str
) -> None:
    daemon, identity, plain = stranger(secured)[who]
    url = f"{'' if plain else 'tls://'}localhost:{secured.port(daemon)}"
    client = kvstore.connect(url, timeout=SOON, identity=identity)
    with pytest.raises(Unavailable):
        client.open_namespace(Namespace(SMALL, tenant="search"))
    assert client.match(bytes(32), [], 10).reason is MissReason.UNAVAILABLE
    client.close()


def test_a_daemon_does_not_start_half_secured(secured: Secured, tmp_path: Path) -> None:
    cert, key = (str(path) for path in secured.ours.issue("other.example"))
    ca, credentials = str(secured.ours.ca), f"{secured.ours.path.parent}/credentials.toml"
    pair = {"tls_cert": cert, "tls_key": key}
    for flags, said in (
        ({"listen": "0.0.0.0:0", "credentials": credentials}, "write tls://host:port"),
        ({"listen": "tls://0.0.0.0:0", **pair}, "beyond loopback and needs credentials"),
        ({"listen": "tls://0.0.0.0:0", "credentials": credentials}, "needs tls_cert and tls_key"),
        ({"listen": "127.0.0.1:0", "tls_cert": cert}, "of no use without TLS"),
        ({"credentials": credentials, "http": "0.0.0.0:0"}, "use 127.0.0.1, and a proxy"),
        ({"listen": "tls://127.0.0.1:0", "tls_cert": cert, "tls_key": ca}, "no certificate and its key"),
        ({"listen": "tls://127.0.0.1:0", **pair, "tls_client_ca": key}, "has no certificates"),
    ):
        with pytest.raises(ConfigError, match=said):
            asyncio.run(Daemon(load({"data": f"{tmp_path}/data", **flags})).run())
    assert not (tmp_path / "data").exists()
