"""A credential opens the tenants that it covers, and there is nothing else for it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message_factory import GetMessageClass
from typer.testing import CliRunner

import kvstore
from kvstore import wire
from kvstore.api import MissReason
from kvstore.client import Client
from kvstore.errors import (
    InvalidArgument,
    NamespaceMismatch,
    NamespaceUnknown,
    NotCovered,
    TicketUnknown,
    Unauthenticated,
)
from kvstore.hashing import ROOT, block_hashes
from kvstore.identity import Identity
from kvstore.mapping import introduce, open_mapping
from kvstore.namespace import Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import kvstore_pb2_grpc, operator_pb2, operator_pb2_grpc
from server.cli import app
from server.commands.daemon import Operator
from server.credentials import CredentialFile, CredentialsError, Evidence, hash_of, new_token
from tests.server.conftest import (
    DEADLINE,
    SMALL,
    DaemonProcess,
    Document,
    Fleet,
    document,
    flag_maker,
)
from tests.server.test_commands import latentkv

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can run a process as another user")
STRANGER = 54321  # a uid that no credential names
WORKER = pb.Worker(token=b"w" * 16)
OPERATORS = operator_pb2.DESCRIPTOR.services_by_name["Operator"]


def entry(name: str, proof: str, tenants: list[str], more: str = "") -> str:
    return f"[[credential]]\nname = {name!r}\n{proof}\ntenants = {tenants}\n{more}\n"


class Guarded:
    """A daemon that knows callers, and the tokens of those."""

    daemon: DaemonProcess

    def __init__(self, fleet: Fleet, path: Path, names: Iterable[str]) -> None:
        self.fleet = fleet
        self.file = path / "credentials.toml"
        self.tokens = {name: new_token() for name in names}

    def client(self, name: str = "") -> Client:
        """By a token, or by the uid that we are."""
        made = kvstore.connect(
            self.daemon.url, timeout=DEADLINE, identity=Identity(self.tokens[name]) if name else None
        )
        self.fleet.clients.append(made)
        return made

    def stub(self, name: str = "", **metadata: str) -> Bare:
        """Plain calls, with a token and whatever else."""
        bearer = {"authorization": f"Bearer {self.tokens[name]}"} if name else {}
        return Bare(self.daemon.url, tuple((bearer | metadata).items()))


class Estate(Guarded):
    """One of a single domain."""

    def __init__(self, fleet: Fleet, path: Path, flags: Callable[..., list[str]], **settings: object) -> None:
        super().__init__(fleet, path, ("search", "chat", "both", "ops"))
        self.write()
        self.daemon = fleet.daemon(*flags(credentials=self.file, log_level="debug", **settings))
        self.reads = 0

    def write(self, *, chat: bool = True, worker: str = "map = true") -> None:
        """The file, without `chat` or with other rights of our own uid."""
        tenants = {"search": ["search"], "chat": ["chat"], "both": ["search", "chat"]}
        entries = [
            entry(name, f"token_sha256 = '{hash_of(self.tokens[name])}'", covered)
            for name, covered in tenants.items()
            if chat or name != "chat"
        ]
        entries.append(entry("ops", f"token_sha256 = '{hash_of(self.tokens['ops'])}'", [], "operator = true"))
        if worker:
            entries.append(entry("worker", f"uid = {os.getuid()}", ["search"], worker))
        self.file.write_text("\n".join(entries))

    def reread(self) -> None:
        self.daemon.process.send_signal(signal.SIGHUP)
        self.reads += 1
        self.daemon.wait_for("event=credentials_read", self.reads)


class Bare:
    """The verbs of a channel without our client; each call gives its status and its words."""

    def __init__(self, url: str, metadata: tuple[tuple[str, str], ...]) -> None:
        self._channel = grpc.insecure_channel(url)
        self._metadata = metadata
        self._stubs: list[Any] = [
            kvstore_pb2_grpc.KVStoreStub(self._channel),
            operator_pb2_grpc.OperatorStub(self._channel),
        ]

    def __call__(self, verb: str, *messages: Any) -> tuple[grpc.StatusCode, str]:
        call = next(vars(stub)[verb] for stub in self._stubs if verb in vars(stub))
        streamed = isinstance(call, grpc.StreamStreamMultiCallable | grpc.StreamUnaryMultiCallable)
        try:
            answer = call(
                iter(messages) if streamed else messages[0], timeout=DEADLINE, metadata=self._metadata
            )
            if isinstance(call, grpc.StreamStreamMultiCallable | grpc.UnaryStreamMultiCallable):
                list(answer)
        except grpc.RpcError as failure:
            return failure.code(), failure.details()  # type: ignore[attr-defined]
        return grpc.StatusCode.OK, ""


@pytest.fixture(scope="module")
def estate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Estate]:
    fleet = Fleet()
    with flag_maker() as flags:
        made = Estate(fleet, tmp_path_factory.mktemp("estate"), flags)
        yield made
        assert made.daemon.process.poll() is None
        log = "".join(made.daemon.log)
        assert "call_failed" not in log
        assert not [token for token in made.tokens.values() if token in log]
        fleet.close()


@pytest.fixture(scope="module")
def doc(estate: Estate) -> Document:
    """A document of `chat`, stored."""
    client = estate.client("chat")
    made = document(client, 3, tenant="chat")
    made.store(client)
    assert made.load(client) == 3
    return made


def every_call(doc: Document) -> dict[str, list[Any]]:
    """A call of each verb, which names what `chat` has."""
    hashes, whole = b"".join(doc.hashes), Namespace(SMALL, model="test", tenant="chat").to_json()
    start = pb.LoadStart(namespace=doc.namespace, hashes=hashes, worker=WORKER)
    return {
        "OpenNamespace": [pb.OpenNamespaceRequest(namespace_json=whole)],
        "Match": [pb.MatchRequest(namespace=doc.namespace, hashes=hashes, tokens=193, align=64)],
        "Load": [pb.LoadRequest(start=start)],
        "Reserve": [pb.ReserveRequest(namespace=doc.namespace, parent=ROOT, hashes=hashes, worker=WORKER)],
        "Upload": [pb.UploadRequest(lease=1, worker=WORKER, hash=doc.hashes[0], data=b"x")],
        "Commit": [pb.CommitRequest(lease=1, worker=WORKER)],
        "Durable": [pb.DurableRequest(ticket=1)],
        "Release": [pb.ReleaseRequest(lease=1, worker=WORKER)],
        "Status": [pb.StatusRequest()],
    } | {method.name: [made_of(method.input_type)] for method in OPERATORS.methods}


def made_of(descriptor: Descriptor) -> Any:
    """An empty message: the caller is looked at before what a call says."""
    return GetMessageClass(descriptor)()


# --- who calls


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"authorization": "Bearer " + new_token()},
        {"authorization": "Bearer short"},
        {"authorization": ""},
        {wire.WORKER_KEY: "00" * 16},
        {wire.WORKER_KEY: "no hex"},
    ],
    ids=lambda metadata: str(list(metadata)),
)
def test_who_proves_nothing_is_answered_nothing(
    estate: Estate, doc: Document, metadata: Mapping[str, str]
) -> None:
    stub = estate.stub(**metadata)
    for verb, messages in every_call(doc).items():
        assert stub(verb, *messages)[0] is grpc.StatusCode.UNAUTHENTICATED, verb


def test_every_verb_is_among_those_that_are_tried(doc: Document) -> None:
    verbs = {method.name for method in pb.DESCRIPTOR.services_by_name["KVStore"].methods}
    assert set(every_call(doc)) == verbs | {method.name for method in OPERATORS.methods}


def test_a_client_without_proof_gets_misses_and_no_exception_in_the_models_path(
    estate: Estate, doc: Document
) -> None:
    client = kvstore.connect(estate.daemon.url, timeout=DEADLINE, identity=Identity(new_token()))
    assert client.match(doc.namespace, doc.hashes, 193).reason is MissReason.UNAVAILABLE
    with pytest.raises(Unauthenticated, match="known callers only"):
        client.open_namespace(Namespace(SMALL, tenant="chat"))
    client.close()


# --- tenants


def test_a_tenant_that_is_not_covered_does_not_exist(estate: Estate, doc: Document) -> None:
    """Whatever is named: the status, and the words, that something unknown gets."""
    stub = estate.stub("search")
    calls = every_call(doc)
    unknown = bytes(32)
    for verb in ("Match", "Load", "Reserve"):
        assert stub(verb, *calls[verb]) == (
            grpc.StatusCode.NOT_FOUND,
            f"namespace {doc.namespace[:8].hex()} is not open here; call open_namespace first",
        )
    for tenant in ("chat", "nobody"):  # there is one of these only
        text = Namespace(SMALL, tenant=tenant).to_json()
        code, words = stub("OpenNamespace", pb.OpenNamespaceRequest(namespace_json=text))
        assert (code, words.replace(tenant, "")) == (
            grpc.StatusCode.NOT_FOUND,
            "tenant '' is not covered by this credential; name one that is",
        )
    code, words = stub("Match", pb.MatchRequest(namespace=unknown, align=64))
    assert (code, "is not open here" in words) == (grpc.StatusCode.NOT_FOUND, True)


def test_the_same_client_says_so_by_class(estate: Estate, doc: Document) -> None:
    client = estate.client("search")
    with pytest.raises(NotCovered):
        client.open_namespace(Namespace(SMALL, model="test", tenant="chat"))
    with pytest.raises(NamespaceUnknown):
        client.match(doc.namespace, doc.hashes, 193)


def test_a_credential_of_several_tenants_serves_each_and_they_share_nothing(
    estate: Estate, doc: Document
) -> None:
    client = estate.client("both")
    assert document(client, 3, tenant="chat").load(client) == 3
    own = document(client, 3, tenant="search")
    assert client.match(own.namespace, own.hashes, 193).stored_blocks == 0
    assert not set(own.hashes) & set(doc.hashes)


def test_hashes_of_another_tenant_name_nothing_in_ones_own(estate: Estate, doc: Document) -> None:
    client = estate.client("search")
    mine = client.open_namespace(Namespace(SMALL, model="test", tenant="search"))
    found = client.match(mine, doc.hashes, 193)
    assert (found.stored_blocks, found.reason) == (0, MissReason.NEVER_SEEN)
    with client.load(mine, doc.hashes) as load:
        assert list(load) == []
    with pytest.raises(NamespaceMismatch):
        client.reserve(mine, ROOT, doc.hashes)
    call = pb.ReserveRequest(
        namespace=mine, parent=ROOT, hashes=b"".join(doc.hashes), worker=pb.Worker(token=b"z" * 16)
    )
    assert estate.stub("search")("Reserve", call)[0] is grpc.StatusCode.NOT_FOUND


def test_anothers_lease_and_ticket_are_not_found_even_with_its_workers_token(
    estate: Estate, doc: Document
) -> None:
    """`search` knows all that travels but the token of `chat`."""
    theirs = estate.client("chat")
    document(theirs, 3, tenant="chat")
    more = block_hashes(doc.namespace, [7, *range(64 * 2)])
    lease = theirs.reserve(doc.namespace, ROOT, more)
    (held,) = theirs._leases.values()
    assert held.mapping is None
    worker = pb.Worker(token=theirs._remote.token)
    stub, mine = estate.stub("search"), estate.client("search")
    own = mine.open_namespace(Namespace(SMALL, model="test", tenant="search"))
    upload = pb.UploadRequest(lease=held.id, worker=worker, hash=more[0], data=b"x")
    tries = {
        "Upload": upload,
        "Commit": pb.CommitRequest(lease=held.id, worker=worker),
        "Reserve": pb.ReserveRequest(namespace=own, parent=ROOT, lease=held.id, worker=worker),
    }
    for verb, message in tries.items():
        code, words = stub(verb, message)
        assert code is grpc.StatusCode.NOT_FOUND, verb
        assert words.startswith(f"lease {held.id} is not held by this worker"), verb
    # A lease that is not there is ignored, and so is theirs.
    assert stub("Release", pb.ReleaseRequest(lease=held.id, worker=worker))[0] is grpc.StatusCode.OK
    for block in lease.blocks:
        assert block.data is not None
        block.data[:] = doc.data(block.hash)
    ticket = theirs.commit(lease.lease, more)
    assert stub("Durable", pb.DurableRequest(ticket=ticket)) == (
        grpc.StatusCode.NOT_FOUND,
        f"ticket {ticket} was not given out by this run of the store, or is too old",
    )
    with pytest.raises(TicketUnknown):
        mine.durable(ticket)
    assert theirs.durable(ticket)
    theirs.release(lease.lease)


# --- operators


def test_the_operators_service_needs_the_right_to_it(
    estate: Estate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for method in OPERATORS.methods:
        code, words = estate.stub("both")(method.name, made_of(method.input_type))
        assert (code, "operator = true" in words) == (grpc.StatusCode.NOT_FOUND, True), method.name
    token = tmp_path / "token"
    token.write_text(estate.tokens["ops"] + "\n")
    monkeypatch.setenv("LATENTKV_TOKEN_FILE", str(token))
    with Operator(estate.daemon.url) as daemon:
        assert daemon.report()["mode"] == "ok"
    for said, words, code in ((estate.tokens["search"], "operator", 2), (new_token(), "known callers", 3)):
        token.write_text(said)
        shown = CliRunner().invoke(app, ["status", "--listen", estate.daemon.url])
        assert (shown.exit_code, words in shown.stderr) == (code, True)


def test_totals_are_for_those_who_may_see_every_tenant(estate: Estate, doc: Document) -> None:
    seen, whole = (estate.client(name).status() for name in ("search", "ops"))
    assert (seen.mode, seen.host.capacity_bytes) == (whole.mode, whole.host.capacity_bytes)
    assert whole.host.blocks >= 3
    assert seen.host.blocks == seen.units == seen.namespaces == seen.leases == 0
    assert not [name for name in seen.counters if not name.startswith("client_")]


# --- uids, and who maps


def test_a_uid_is_known_by_the_handover_socket_and_its_worker_maps_the_arena(estate: Estate) -> None:
    client = estate.client()
    mine = document(client, 3, tenant="search", seed=3)
    with pytest.raises(NotCovered):
        client.open_namespace(Namespace(SMALL, tenant="chat"))
    mine.store(client)
    assert mine.load(client) == 3
    estate.daemon.wait_for("event=worker_mapped")
    estate.daemon.wait_for("caller=worker")
    # Who comes with the token of another worker's handover is not taken for it.
    mapping = open_mapping(str(estate.daemon.socket), DEADLINE)
    worker = pb.Worker(token=mapping.identity.token, mapped=True)
    call = pb.ReserveRequest(
        namespace=mine.namespace, parent=ROOT, hashes=b"".join(mine.hashes), worker=worker
    )
    code, words = estate.stub("both")("Reserve", call)
    assert (code, "no handover connection" in words) == (grpc.StatusCode.UNAVAILABLE, True)
    own = estate.stub(**{wire.WORKER_KEY: mapping.identity.token.hex()})
    assert own("Reserve", call)[0] is grpc.StatusCode.OK
    mapping.retire()


def test_a_restarted_daemon_knows_the_same_client_again(estate: Estate) -> None:
    by_uid, by_token = estate.client(), estate.client("both")
    mine = document(by_uid, 3, tenant="search", seed=4)
    mine.store(by_uid)
    document(by_token, 3, tenant="search", seed=4)
    assert estate.daemon.term() == 0
    estate.daemon.start()
    estate.reads = 0
    for client in (by_uid, by_token):
        assert client.match(mine.namespace, mine.hashes, 193).blocks == 3
        assert mine.load(client) == 3


def test_a_uid_that_may_not_map_gets_bytes_and_no_memory(estate: Estate) -> None:
    try:
        estate.write(worker="")
        estate.reread()
        with pytest.raises(kvstore.errors.ArenaUnavailable, match="refused"):
            introduce(str(estate.daemon.socket), DEADLINE)
        estate.write(worker="map = false")
        estate.reread()
        client = estate.client()
        mine = document(client, 3, tenant="search", seed=5)
        mine.store(client)
        assert mine.load(client) == 3
        estate.daemon.wait_for("event=worker_known")
        with pytest.raises(kvstore.errors.ArenaUnavailable, match="do not let this uid map"):
            open_mapping(str(estate.daemon.socket), DEADLINE)
        # It says that it maps: slots that it cannot fill would hold what was in them before.
        known = introduce(str(estate.daemon.socket), DEADLINE)
        worker = pb.Worker(token=known.token, mapped=True)
        call = pb.ReserveRequest(namespace=mine.namespace, parent=ROOT, worker=worker)
        stub = estate.stub(**{wire.WORKER_KEY: known.token.hex()})
        assert stub("Reserve", call)[0] is grpc.StatusCode.UNAVAILABLE
        known.close()
    finally:
        estate.write()
        estate.reread()


@AS_ROOT
def test_a_process_of_another_user_is_nobody(estate: Estate) -> None:
    for path in (estate.daemon.socket, *estate.daemon.socket.parents[:2]):
        path.chmod(path.stat().st_mode | 0o011 | 0o066 * path.is_socket())  # the directories let it in
    run = "import socket, sys\ns = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(100))"
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-c", run, str(estate.daemon.arena_socket)],
        user=STRANGER,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.stdout == "b''\n", done.stderr
    estate.daemon.wait_for(f"uid={STRANGER} reason=")


# --- the file


def test_what_the_file_no_longer_names_is_refused_at_the_next_call(estate: Estate, doc: Document) -> None:
    client = estate.client("chat")
    assert client.match(doc.namespace, doc.hashes, 193).blocks == 3
    try:
        estate.write(chat=False)
        estate.reread()
        assert client.match(doc.namespace, doc.hashes, 193).reason is MissReason.UNAVAILABLE
        estate.file.write_text("[[credential]]\nname = 'broken'")
        estate.daemon.process.send_signal(signal.SIGHUP)
        estate.daemon.wait_for("event=credentials_refused")
        other = estate.client("both")
        assert document(other, 3, tenant="chat").load(other) == 3
    finally:
        estate.write()
        estate.reread()
    assert client.match(doc.namespace, doc.hashes, 193).blocks == 3


def test_no_token_is_in_the_file(estate: Estate) -> None:
    text = estate.file.read_text()
    assert not [token for token in estate.tokens.values() if token in text or token[9:] in text]


BAD = {
    "no proof": (entry("a", "", ["t"]), "exactly one of"),
    "two proofs": (entry("a", "uid = 1\ncertificate = 'x'", ["t"]), "exactly one of"),
    "a token in the clear": (entry("a", "token_sha256 = 'latentkv_x'", ["t"]), "token_sha256"),
    "no tenants": (entry("a", "uid = 1", []), "give it tenants"),
    "a map without a uid": (entry("a", "certificate = 'x'", ["t"], "map = true"), "map needs a uid"),
    "a name twice": (entry("a", "uid = 1", ["t"]) + entry("a", "uid = 2", ["t"]), "two credentials"),
    "a proof twice": (entry("a", "uid = 1", ["t"]) + entry("b", "uid = 1", ["t"]), "two credentials"),
    "an unknown key": (entry("a", "uid = 1", ["t"], "root = true"), "root"),
    "no TOML": ("=", "no TOML"),
    "nothing": ("", "credential"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_wrong_is_refused_with_one_line(tmp_path: Path, name: str) -> None:
    text, said = BAD[name]
    file = tmp_path / "credentials.toml"
    file.write_text(text)
    with pytest.raises(CredentialsError, match=said) as raised:
        CredentialFile(file)
    assert "\n" not in str(raised.value)
    assert str(file) in str(raised.value)


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "credentials.toml"
    file.write_text(entry("a", "uid = 1", ["t"]))
    assert CredentialFile(file).caller(Evidence(uid=1)) is not None
    file.chmod(0o620)
    with pytest.raises(CredentialsError, match="may be written by others"):
        CredentialFile(file)


def test_a_daemon_does_not_start_with_a_file_that_is_wrong(tmp_path: Path) -> None:
    line = latentkv("serve", "--data", f"{tmp_path}/data", "--credentials", f"{tmp_path}/absent", code=2)
    assert "absent cannot be read" in line
    assert not (tmp_path / "data").exists()


def test_the_command_writes_a_token_for_its_owner_alone_and_prints_what_the_file_needs(
    tmp_path: Path,
) -> None:
    out = tmp_path / "token"
    command = ["token", "engine", "--out", str(out)]
    printed = CliRunner().invoke(app, [*command, "--tenants", "search,chat"]).stdout
    assert out.stat().st_mode & 0o777 == 0o600
    token = out.read_text().strip()
    assert token not in printed
    file = tmp_path / "credentials.toml"
    file.write_text(printed)
    caller = CredentialFile(file).caller(Evidence(token=token))
    assert caller is not None
    assert (caller.name, caller.tenants, caller.operator) == ("engine", {"search", "chat"}, False)
    assert Identity.from_files(str(out)).token == token
    for arguments, said in (([*command, "--tenants", "x"], "exists"), (command, "give --tenants")):
        refused = CliRunner().invoke(app, arguments)
        assert (refused.exit_code, said in refused.stderr) == (2, True)


# --- what a client refuses


def test_a_token_is_neither_shown_nor_sent_in_the_clear(tmp_path: Path) -> None:
    identity = Identity(new_token())
    assert identity.token not in repr(identity)
    with pytest.raises(InvalidArgument, match="in the clear; write tls://") as raised:
        kvstore.connect("203.0.113.7:7443", identity=identity)
    assert identity.token not in str(raised.value)
    with pytest.raises(InvalidArgument, match="no line of printable"):
        Identity("two words")
    with pytest.raises(InvalidArgument, match="give both"):
        Identity(cert=tmp_path / "cert.pem")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        Identity.from_files(str(tmp_path / "absent"))
    with pytest.raises(InvalidArgument, match="not spoken to with TLS"):
        kvstore.connect("127.0.0.1:1", identity=Identity(ca=tmp_path / "ca.pem"))
