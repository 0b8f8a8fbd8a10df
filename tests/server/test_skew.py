"""Answers of a daemon that is newer or older than whoever asks: real gRPC servers with other messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import xxhash

import kvstore
from kvstore.api import MissReason, ReserveState
from kvstore.client import Client
from kvstore.errors import InvalidArgument, LeaseUnknown, Unavailable
from kvstore.hashing import ROOT
from kvstore.namespace import Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import kvstore_pb2_grpc, operator_pb2_grpc
from kvstore.v1 import operator_pb2 as operator_pb
from kvstore.wire import NotUnderstood
from tests.server.conftest import DEADLINE, SMALL, Fleet, document, start
from tests.server.test_commands import latentkv

Flags = Callable[..., list[str]]
HASHES = [bytes([index]) * 32 for index in range(3)]
UNKNOWN_FIELD = b"\xfa\x3e\x03new"  # field 1007, three bytes


class Future(kvstore_pb2_grpc.KVStoreServicer):
    """A daemon whose answers are set by the test."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}

    def OpenNamespace(self, request: Any, context: Any) -> Any:
        return pb.OpenNamespaceResponse(digest=bytes(32))

    def Match(self, request: Any, context: Any) -> Any:
        return self._answer("Match", context)

    def Load(self, requests: Any, context: Any) -> Iterator[Any]:
        yield from self.answers["Load"]

    def Reserve(self, request: Any, context: Any) -> Any:
        return self._answer("Reserve", context)

    def Release(self, request: Any, context: Any) -> Any:
        return pb.ReleaseResponse()

    def Status(self, request: Any, context: Any) -> Any:
        return pb.StatusResponse()

    def _answer(self, verb: str, context: Any) -> Any:
        answer = self.answers[verb]
        if callable(answer):
            answer(context)
        return answer


@contextmanager
def serving(add: Callable[[grpc.Server], None]) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def future() -> Iterator[tuple[Future, Client]]:
    daemon = Future()
    with serving(lambda server: kvstore_pb2_grpc.add_KVStoreServicer_to_server(daemon, server)) as url:
        client = kvstore.connect(url, timeout=DEADLINE)
        client.open_namespace(Namespace(layout=SMALL))
        yield daemon, client
        client.close()


def of_the_future(message: Any) -> Any:
    """The message with a field that nobody knows yet."""
    message.MergeFromString(UNKNOWN_FIELD)
    return message


def refusal(code: grpc.StatusCode, name: str, bases: str = "") -> Callable[[Any], None]:
    def refuse(context: Any) -> None:
        context.set_trailing_metadata((("latentkv-error", name), ("latentkv-error-bases", bases)))
        context.abort(code, "it is too warm")

    return refuse


def test_a_match_with_a_reason_kinds_and_fields_of_the_future_is_a_match(
    future: tuple[Future, Client], caplog: pytest.LogCaptureFixture
) -> None:
    daemon, client = future
    daemon.answers["Match"] = of_the_future(
        pb.MatchResponse(
            blocks=2, host_blocks=2, reason="too_warm", persist_tokens=[128], persist_kinds=[64 | 1]
        )
    )
    with caplog.at_level(logging.INFO):
        match = client.match(bytes(32), HASHES, 200)
    assert (match.blocks, match.reason) == (2, MissReason.UNKNOWN)
    assert [(point.tokens, int(point.kinds) & 7) for point in match.persist_points] == [(128, 1)]
    assert "upgrade" in caplog.text


def test_kinds_of_messages_of_the_future_are_passed_over(future: tuple[Future, Client]) -> None:
    daemon, client = future
    piece = pb.Chunk(block=0, data=bytes(SMALL.block_bytes), last=True)
    piece.checksum = xxhash.xxh3_64_intdigest(bytes(SMALL.block_bytes))
    strange = of_the_future(pb.LoadResponse())
    daemon.answers["Load"] = [
        strange,
        pb.LoadResponse(lease=1),
        strange,
        pb.LoadResponse(chunk=piece),
        strange,
        pb.LoadResponse(short=1),
    ]
    with client.load(bytes(32), HASHES) as load:
        assert [block.index for batch in load for block in batch] == [0]
    assert load.short == 1
    daemon.answers["Load"] = [pb.LoadResponse(lease=1), strange]
    with client.load(bytes(32), HASHES) as load:
        assert list(load) == []
    assert load.short == 0


def test_states_of_the_future_are_nothing_to_do(future: tuple[Future, Client]) -> None:
    daemon, client = future
    daemon.answers["Reserve"] = pb.ReserveResponse(lease=1, states=bytes([0, 9, 2]))
    answer = client.reserve(bytes(32), ROOT, HASHES)
    states = [block.state for block in answer.blocks]
    assert states == [ReserveState.PRESENT, ReserveState.PENDING, ReserveState.FILL]
    assert [block.data is not None for block in answer.blocks] == [False, False, True]


def test_an_answer_that_does_not_fit_the_question_is_unavailable(future: tuple[Future, Client]) -> None:
    daemon, client = future
    daemon.answers["Reserve"] = pb.ReserveResponse(lease=1, states=bytes([0]))
    with pytest.raises(NotUnderstood, match="release"):
        client.reserve(bytes(32), ROOT, HASHES)
    assert not client._leases


@pytest.mark.parametrize("code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE])
def test_an_error_of_the_future_is_a_miss_and_says_who_must_be_upgraded(
    code: grpc.StatusCode, future: tuple[Future, Client]
) -> None:
    daemon, client = future
    daemon.answers["Match"] = daemon.answers["Reserve"] = refusal(code, "TooWarm")
    assert client.match(bytes(32), HASHES, 200).reason is MissReason.UNAVAILABLE
    with pytest.raises(NotUnderstood, match=r"too warm \(TooWarm\).* newer than this client"):
        client.reserve(bytes(32), ROOT, HASHES)


def test_an_error_of_the_future_is_the_nearest_that_is_known(future: tuple[Future, Client]) -> None:
    daemon, client = future
    bases = "LeaseTooWarm LeaseUnknown KVStoreError"
    daemon.answers["Reserve"] = refusal(grpc.StatusCode.NOT_FOUND, "LeaseMuchTooWarm", bases)
    with pytest.raises(LeaseUnknown, match="too warm"):
        client.reserve(bytes(32), ROOT, HASHES)
    daemon.answers["Reserve"] = refusal(grpc.StatusCode.INVALID_ARGUMENT, "TooWarm")
    with pytest.raises(InvalidArgument, match="too warm"):
        client.reserve(bytes(32), ROOT, HASHES)


def test_a_call_that_an_older_daemon_does_not_know_says_so(future: tuple[Future, Client]) -> None:
    _, client = future
    with pytest.raises(Unavailable, match="upgrade the daemon"):
        client.durable(1)


# --- operators


class OtherOperator(operator_pb2_grpc.OperatorServicer):
    """Answers of an operator's service of another release."""

    def __init__(self, report: dict[str, Any]) -> None:
        self._report = report

    def Report(self, request: Any, context: Any) -> Any:
        return of_the_future(operator_pb.ReportResponse(report_json=json.dumps(self._report)))

    def Namespaces(self, request: Any, context: Any) -> Any:
        known = Namespace(layout=SMALL).to_json()
        strange = json.dumps(json.loads(known) | {"warmth": 3})
        return operator_pb.NamespacesResponse(
            namespaces=[
                operator_pb.OpenNamespace(namespace_json=each, digest=bytes([index]) * 32)
                for index, each in enumerate((known, strange))
            ]
        )

    def Trail(self, request: Any, context: Any) -> Any:
        trail = {
            "blocks": 1,
            "host_blocks": 1,
            "disk_blocks": 0,
            "unit_blocks": 1,
            "stored_blocks": 1,
            "seen_blocks": 1,
            "reason": "too_warm",
            "units": [],
            "beyond": [],
            "gone": {"why": "melted", "at": 1.0},
            "warmth": 3,
        }
        return operator_pb.TrailResponse(trail_json=json.dumps(trail))


@contextmanager
def operated(report: dict[str, Any]) -> Iterator[str]:
    service = OtherOperator(report)
    with serving(lambda server: operator_pb2_grpc.add_OperatorServicer_to_server(service, server)) as url:
        yield url


@pytest.fixture
def report(fleet: Fleet, flags: Flags) -> dict[str, Any]:
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 2)
    client.match(doc.namespace, doc.hashes, len(doc.tokens))
    found: dict[str, Any] = json.loads(latentkv("status", "--listen", daemon.url, "--json"))
    return found


def test_status_shows_what_it_knows_of_a_newer_daemon(report: dict[str, Any]) -> None:
    report["mode"] = "too_warm"
    report["warmth"] = 3
    report["tiers"].append({"tier": "tape", "used_bytes": 1, "capacity_bytes": 2, "blocks": 3})
    report["misses"].append({"reason": "too_warm", "matches": 1, "tokens": 64})
    with operated(report) as url:
        shown = latentkv("status", "--listen", url)
        latentkv("top", "--listen", url, "--looks", "2", "--seconds", "0.1")
    assert "too_warm" in shown
    assert "TAPE" in shown
    assert "ready" not in shown


def test_status_says_in_one_line_that_an_older_daemon_must_be_upgraded(report: dict[str, Any]) -> None:
    for tenant in report["tenants"]:
        del tenant["matched_tokens"]
    with operated(report) as url:
        said = latentkv("status", "--listen", url, code=3)
    assert "'matched_tokens'" in said
    assert "upgrade the daemon" in said
    assert said.count("\n") == 1


def test_a_command_that_an_older_daemon_does_not_know_says_so_in_one_line(report: dict[str, Any]) -> None:
    with operated(report) as url:
        said = latentkv("units", "list", "--listen", url, code=3)
    assert "upgrade the daemon" in said
    assert said.count("\n") == 1


def test_explain_names_a_reason_and_a_fate_of_the_future(report: dict[str, Any], tmp_path: Any) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(list(range(200))))
    with operated(report) as url:
        shown = latentkv("explain", str(prompt), "--listen", url)
    assert "too_warm" in shown
    assert "melted" in shown
    assert "Upgrade" in shown
