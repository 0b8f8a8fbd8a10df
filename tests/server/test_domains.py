"""A trust domain has an arena of its own: who maps it sees nothing of the others' tenants, ever."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from kvstore.client import Client
from kvstore.errors import NotCovered, UnitUnknown
from kvstore.hashing import ROOT
from kvstore.mapping import open_mapping
from kvstore.namespace import Namespace
from kvstore.remote_load import MappedLoad
from kvstore.v1 import kvstore_pb2 as pb
from server.cli import app
from server.commands.daemon import Operator
from server.config import ConfigError, load
from server.credentials import CredentialFile, CredentialsError, Evidence, hash_of
from tests.server.conftest import (
    DEADLINE,
    SMALL,
    Document,
    Fleet,
    document,
    flag_maker,
    page_of,
)
from tests.server.test_commands import latentkv
from tests.server.test_lifecycle import refused
from tests.server.test_metrics import scrape
from tests.server.test_tenants import AS_ROOT, STRANGER, Guarded, entry
from tests.server.test_web import get

MIB = 1 << 20
NEAR, FAR = 6 * MIB, 4 * MIB  # the arenas' sizes
TOKENS = {
    # name: tenants and what else its entry says; `near` is a tenant of the first domain, `far` of the other
    "near": (["near"], ""),
    "every": (["*"], ""),
    "ops": ([], "operator = true"),
    "far": (["far"], 'domain = "b"'),
    "far-ops": ([], 'domain = "b"\noperator = true'),
}

OPERATORS = {"near": "ops", "far": "far-ops"}  # of a tenant's domain


class Town(Guarded):
    """A daemon of two domains. Our own uid maps the second one, and another the first."""

    def __init__(self, fleet: Fleet, path: Path, flags: Callable[..., list[str]]) -> None:
        super().__init__(fleet, path, TOKENS)
        self.file.write_text(self.entries())
        sizes = {"b": {"host_bytes": FAR, "disk_bytes": "64MiB"}}
        self.flags = flags(
            credentials=self.file,
            domains=json.dumps(sizes),
            host_bytes=NEAR,
            disk_bytes="96MiB",
            http="127.0.0.1:0",
        )
        self.daemon = fleet.daemon(*self.flags)

    def entries(self) -> str:
        listed = [
            entry(name, f"token_sha256 = '{hash_of(self.tokens[name])}'", tenants, more)
            for name, (tenants, more) in TOKENS.items()
        ]
        listed.append(entry("worker", f"uid = {STRANGER}", ["near"], "map = true"))
        listed.append(entry("far-worker", f"uid = {os.getuid()}", ["far"], 'map = true\ndomain = "b"'))
        return "".join(listed)

    def arenas(self) -> dict[int, mmap.mmap]:
        """The daemon's arenas by the number of their file, as the daemon has them."""
        found = {}
        for link in Path(f"/proc/{self.daemon.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # a connection that has ended meanwhile
                if "memfd:latentkv-arena" in os.readlink(link):
                    with link.open("rb") as file:
                        inode = os.fstat(file.fileno()).st_ino
                        found[inode] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return found


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    fleet = Fleet()
    with flag_maker() as flags:
        made = Town(fleet, tmp_path_factory.mktemp("town"), flags)
        yield made
        assert made.daemon.process.poll() is None
        assert "call_failed" not in "".join(made.daemon.log)
        fleet.close()


@pytest.fixture
def operator(town: Town, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Operator]:
    """Asks as the operator of this name, and lets commands do so."""

    def ask(name: str) -> Operator:
        (tmp_path / "token").write_text(town.tokens[name])
        monkeypatch.setenv("LATENTKV_TOKEN_FILE", str(tmp_path / "token"))
        return Operator(town.daemon.url)

    return ask


@contextmanager
def user(uid: int) -> Iterator[None]:
    """What connects within is a process of this user."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


def handed_over(path: Path) -> tuple[int, int]:
    """What the handover socket gives to this process: the number of its file, and its size."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))
        _, (descriptor,), _, _ = socket.recv_fds(connection, 4096, 8)
        found = os.fstat(descriptor)
        os.close(descriptor)
        return found.st_ino, found.st_size


def traces(doc: Document, memory: mmap.mmap) -> int:
    """How many blocks of a document are somewhere in there, if only by their first bytes."""
    return sum(memory.find(doc.data(block)[:64]) >= 0 for block in doc.hashes)


def hit_by_mapping(client: Client, doc: Document) -> None:
    """Store a document and load it by no stream of bytes."""
    doc.store(client)
    assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).blocks == len(doc.hashes)
    with client.load(doc.namespace, doc.hashes) as load:
        assert isinstance(load, MappedLoad)
        assert [bytes(block.data) for batch in load for block in batch] == [
            doc.data(each) for each in doc.hashes
        ]


# --- memory


def test_a_worker_maps_its_own_domains_arena_and_no_byte_of_another_domain_is_ever_in_it(town: Town) -> None:
    """More than each arena holds goes through it, so that every slot has been another block's."""
    mapping, sending = town.client(), town.client("near")
    mine, theirs = [], []
    for seed in range(4):
        theirs.append(document(sending, 120, seed=seed, tenant="near"))
        mine.append(document(mapping, 80, seed=seed, tenant="far"))
        hit_by_mapping(mapping, mine[-1])
        theirs[-1].store(sending)
        assert theirs[-1].load(sending) == 120
    given, nbytes = handed_over(town.daemon.arena_socket)
    arenas = town.arenas()
    assert nbytes == FAR
    assert sorted(len(arena) for arena in arenas.values()) == [FAR, NEAR]
    own = arenas.pop(given)
    (foreign,) = arenas.values()
    assert traces(theirs[-1], foreign) == 120  # what is stored there is found there
    assert traces(mine[-1], own) == 80
    assert [traces(doc, own) for doc in theirs] == [0] * 4
    assert [traces(doc, foreign) for doc in mine] == [0] * 4
    assert town.daemon.ready.count(" host ") == 2


@AS_ROOT
def test_workers_of_both_domains_hit_by_their_mappings(town: Town) -> None:
    for path in town.daemon.socket.parents[:2]:
        path.chmod(path.stat().st_mode | 0o011)
    files, far = set(), town.client()
    hit_by_mapping(far, document(far, 3, seed=9, tenant="far"))
    files.add(handed_over(town.daemon.arena_socket)[0])
    with user(STRANGER):
        near = town.client()
        hit_by_mapping(near, document(near, 3, seed=9, tenant="near"))
        files.add(handed_over(town.daemon.arena_socket)[0])
        near.close()
    assert files == town.arenas().keys()


def test_the_token_of_another_domains_worker_names_nothing(town: Town) -> None:
    mapping = open_mapping(str(town.daemon.socket), DEADLINE)
    worker = pb.Worker(token=mapping.identity.token, mapped=True)
    near = document(town.client("near"), 2, tenant="near")
    call = pb.ReserveRequest(namespace=near.namespace, parent=ROOT, worker=worker)
    code, words = town.stub("near")("Reserve", call)
    assert (code, "no handover connection" in words) == (grpc.StatusCode.UNAVAILABLE, True)
    mapping.retire()


# --- what can be named


def test_a_credential_of_one_domain_names_nothing_of_another(town: Town) -> None:
    far, near = town.client(), town.client("near")
    theirs, others = document(far, 2, tenant="far", seed=5), document(near, 2, tenant="near")
    theirs.store(far)
    match = pb.MatchRequest(namespace=theirs.namespace, hashes=b"".join(theirs.hashes), tokens=129, align=64)
    for name in ("near", "every"):  # all tenants are all that no other domain has
        with pytest.raises(NotCovered):
            town.client(name).open_namespace(Namespace(SMALL, model="test", tenant="far"))
        assert town.stub(name)("Match", match)[0] is grpc.StatusCode.NOT_FOUND
    assert document(town.client("every"), 2, tenant="anybody").namespace
    assert town.stub("far")("Match", match)[0] is grpc.StatusCode.OK
    match.namespace = others.namespace
    assert town.stub("far")("Match", match)[0] is grpc.StatusCode.NOT_FOUND
    by_bytes = town.client("far")
    assert document(by_bytes, 2, tenant="far", seed=5).load(by_bytes) == 2


def test_an_operator_sees_and_touches_the_own_domain_only(
    town: Town, operator: Callable[[str], Operator]
) -> None:
    clients = {name: town.client(name) for name in ("near", "far")}
    docs = {name: document(client, 2, tenant=name, seed=6) for name, client in clients.items()}
    for name, doc in docs.items():
        doc.store(clients[name])
    for tenant, other, domain in (("near", "far", "default"), ("far", "near", "b")):
        with operator(OPERATORS[tenant]) as asking:
            report = asking.report()
            assert (report["domain"], report["domains"]) == (domain, ["default", "b"])
            assert other not in {each["tenant"] for each in report["tenants"] + report["namespaces"]}
            assert {each["tenant"] for each in asking.units(None, "used", 1000)} >= {tenant}
            assert asking.units(other, "used", 1000) == []
            assert other not in {each.namespace.tenant for each in asking.namespaces()}
            with pytest.raises(UnitUnknown):
                asking.unit(docs[other].hashes[-1].hex())
            assert asking.delete("unit", docs[tenant].hashes[-1].hex())["blocks"] == 2
        shown = latentkv("status", "--listen", town.daemon.url)
        assert f"domain {domain} of default, b" in " ".join(shown.split())


# --- what is shown


def test_pages_and_metrics_show_each_domain(town: Town) -> None:
    far = town.client()
    doc = document(far, 2, tenant="far", seed=7)
    far.match(doc.namespace, doc.hashes, 129)
    url = page_of(town.daemon)
    assert get(url + "readyz") == (200, "ok\n")
    capacities = {}
    for domain, path in (("default", ""), ("b", "domains/b/")):
        report = json.loads(get(url + path + "status.json")[1])
        capacities[report["domain"]] = [tier["capacity_bytes"] for tier in report["tiers"]]
        assert "status.json" in get(url + path)[1]
        assert report["domain"] == domain
    assert capacities == {"default": [NEAR, 96 * MIB], "b": [FAR, 64 * MIB]}
    _, samples = scrape(url)
    for tier, at in (("host", 0), ("disk", 1)):
        for domain, label in (("default", set()), ("b", {("domain", "b")})):
            named = frozenset({("tier", tier), *label})
            assert samples["latentkv_tier_capacity_bytes", named] == capacities[domain][at]
    missed = frozenset({"tenant": "far", "reason": "never_seen", "domain": "b"}.items())
    assert samples["latentkv_matches_total", missed] >= 1
    assert not [labels for _, labels in samples if ("tenant", "far") in labels - {("domain", "b")} == labels]
    assert (
        samples["latentkv_step_duration_seconds_count", frozenset({("step", "match"), ("domain", "b")})] >= 1
    )
    assert [labels for name, labels in samples if name == "latentkv_ready"] == [frozenset()]


# --- life


def test_a_drain_writes_what_is_due_in_both_domains_and_both_hit_after_it(
    town: Town, operator: Callable[[str], Operator]
) -> None:
    docs = {}
    for tenant, client in (("near", town.client("near")), ("far", town.client())):
        doc = docs[tenant] = document(client, 3, tenant=tenant, seed=8)
        doc.store(client)
        assert doc.load(client) == 3  # a use, which is written at the end, if nothing else is within a minute
    assert town.daemon.term() == 0
    data = Path(town.flags[town.flags.index("--data") + 1])
    checked = CliRunner().invoke(app, ["check", str(data)])
    assert checked.exit_code == 0
    assert f"{data / 'domains' / 'b'} is the store of another domain; check it, too" in checked.stderr
    assert CliRunner().invoke(app, ["check", str(data / "domains" / "b")]).exit_code == 0
    town.daemon.start()
    for tenant, client in (("near", town.client("near")), ("far", town.client())):
        doc = document(client, 3, tenant=tenant, seed=8)
        assert doc == docs[tenant]
        assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).disk_blocks == 3
        with operator(OPERATORS[tenant]) as asking:
            assert asking.unit(doc.hashes[-1].hex())["hits"] == 1
        assert doc.load(client) == 3


def test_a_tenant_that_moves_needs_a_restart(town: Town) -> None:
    moved = town.entries().replace("tenants = ['near']", "tenants = ['near']\ndomain = 'b'", 1)
    town.file.write_text(moved)
    try:
        town.daemon.process.send_signal(signal.SIGHUP)
        town.daemon.wait_for("event=credentials_refused")
        assert "restart the daemon" in "".join(town.daemon.log)
        assert document(near := town.client("near"), 2, tenant="near").load(near) >= 0
    finally:
        town.file.write_text(town.entries())


# --- what is refused


def file_of(path: Path, *entries: str) -> Path:
    path.write_text("".join(entries))
    return path


B = 'domain = "b"'
ASTRAY = {
    "an unknown domain": (
        entry("x", "uid = 1", ["t"], 'domain = "c"'),
        "the daemon has default, b; name one",
    ),
    "a tenant in two": (
        entry("x", "uid = 1", ["t"]) + entry("y", "uid = 2", ["t"], B),
        "its tenant 't' of 'default'; name one domain for it",
    ),
    "all tenants in two": (entry("x", "uid = 1", ["*"], B) + entry("y", "uid = 2", ["*"]), "its tenant"),
}


@pytest.mark.parametrize("name", ASTRAY)
def test_credentials_that_blur_the_domains_are_refused(tmp_path: Path, name: str) -> None:
    text, said = ASTRAY[name]
    with pytest.raises(CredentialsError) as raised:
        CredentialFile(file_of(tmp_path / "c.toml", text), ("default", "b"))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


MOVES = {
    "a-tenant": (entry("x", "uid = 1", ["t"]), entry("x", "uid = 2", ["t"], B)),
    "a-uid": (entry("x", "uid = 1", ["t"], "map = true"), entry("x", "uid = 1", ["u"], f"map = true\n{B}")),
    "one-of-all": (
        entry("x", "uid = 1", ["*"]),
        entry("x", "uid = 1", ["*"]) + entry("y", "uid = 2", ["t"], B),
    ),
    "one-of-all-that-are-no-more": (entry("x", "uid = 1", ["*"]), entry("y", "uid = 2", ["t"], B)),
}


@pytest.mark.parametrize("what", MOVES)
def test_what_moves_to_another_domain_is_refused_while_the_daemon_runs(tmp_path: Path, what: str) -> None:
    before, after = MOVES[what]
    file = tmp_path / "c.toml"
    known = CredentialFile(file_of(file, before), ("default", "b"))
    file_of(file, after)
    with pytest.raises(CredentialsError, match="restart the daemon"):
        known.reload()
    file_of(file, entry("z", "uid = 9", ["z"]))  # not even by way of a file without it
    known.reload()
    file_of(file, after)
    with pytest.raises(CredentialsError, match="restart the daemon"):
        known.reload()
    assert known.caller(Evidence(uid=9)) is not None
    assert CredentialFile(file, ("default", "b")).caller(Evidence(uid=9)) is None


def test_all_tenants_are_those_that_no_other_domain_has_or_had(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    every = entry("x", "uid = 1", ["*"])
    known = CredentialFile(file_of(file, every + entry("y", "uid = 2", ["far"], B)), ("default", "b"))
    file_of(file, every)
    known.reload()
    caller = known.caller(Evidence(uid=1))
    assert caller is not None
    assert (caller.covers("near"), caller.covers("far")) == (True, False)


SIZES = {"host_bytes": "4MiB", "disk_bytes": "64MiB"}
WRONG = {
    "no credentials": ({"domains": {"b": SIZES}, "credentials": None}, "need credentials"),
    "no arena": (
        {"domains": {"b": {"disk_bytes": "64MiB"}}},
        "domains.b.host_bytes is not set (from --domains)",
    ),
    "no room in the arena": (
        {"domains": {"b": SIZES | {"host_bytes": "1KiB"}}},
        "domains.b.host_bytes=1024 is below",
    ),
    "no room on the disk": (
        {"domains": {"b": SIZES | {"disk_bytes": "1MiB"}}},
        "domains.b.disk_bytes=1048576 is",
    ),
    "no size": (
        {"domains": {"b": SIZES | {"host_bytes": "much"}}},
        "domains.b.host_bytes='much' (from --domains)",
    ),
    "another setting": (
        {"domains": {"b": SIZES | {"codec": "raw"}}},
        "domains.b.codec='raw' (from --domains)",
    ),
    "a path": ({"domains": {"../b": SIZES}}, "'../b' is no name of a domain; write"),
    "the first one's name": ({"domains": {"default": SIZES}}, "there is 'default' already"),
    "no map": ({"domains": "b"}, "write JSON"),
}


@pytest.mark.parametrize("name", WRONG)
def test_domains_that_are_set_wrongly_are_refused_with_one_line(name: str) -> None:
    given, said = WRONG[name]
    flags = {"data": "/d", "credentials": "/c.toml"} | given
    texts = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in flags.items()}
    with pytest.raises(ConfigError) as raised:
        load(texts)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_domain_whose_memory_cannot_be_had_stops_the_start(tmp_path: Path) -> None:
    sizes = {"b": {"host_bytes": "1PiB", "disk_bytes": "64MiB"}}
    file = file_of(tmp_path / "c.toml", entry("x", "uid = 1", ["t"], B))
    given = {
        "data": tmp_path / "data",
        "credentials": file,
        "domains": json.dumps(sizes),
        "host-bytes": "4MiB",
    }
    flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    assert f"arena of {1 << 50} bytes: only" in refused(flags)


def test_the_command_prints_the_domain_of_a_token(tmp_path: Path) -> None:
    command = ["token", "x", "--out", str(tmp_path / "token"), "--tenants", "t", "--domain", "b"]
    file = file_of(tmp_path / "c.toml", CliRunner().invoke(app, command).stdout)
    caller = CredentialFile(file, ("default", "b")).caller(
        Evidence(token=(tmp_path / "token").read_text().strip())
    )
    assert caller is not None
    assert (caller.domain, caller.tenants) == ("b", {"t"})
