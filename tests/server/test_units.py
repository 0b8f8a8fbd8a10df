"""``latentkv units`` against a daemon: listing, pins and deletion, and how they fail."""

from __future__ import annotations

import asyncio
import json
import queue
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from kvstore.api import MissReason
from kvstore.client import Client
from kvstore.errors import DeadlineExceeded
from kvstore.v1 import operator_pb2 as pb
from kvstore.v1 import operator_pb2_grpc
from server.cli import app
from server.commands.daemon import Operator
from server.operators import OperatorService
from tests.server.conftest import DEADLINE, DaemonProcess, Document, Fleet, document, flag_maker
from tests.server.test_commands import latentkv


@dataclass
class House:
    """A daemon, and a client of it."""

    daemon: DaemonProcess
    client: Client

    def run(self, *words: str, code: int = 0, answer: str = "") -> str:
        """``latentkv units`` in this process; its output, or its one line on stderr."""
        done = CliRunner().invoke(app, ["units", *words, "--listen", self.daemon.url], input=answer)
        assert done.exit_code == code, done.output
        return done.stdout if not code else done.stderr

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "--json"))

    def store(self, seed: int, tenant: str = "default") -> Document:
        doc = document(self.client, 4, seed=seed, tenant=tenant)
        doc.store(self.client)
        return doc

    def match(self, doc: Document):
        return self.client.match(doc.namespace, doc.hashes, len(doc.tokens))

    def restart(self, fleet: Fleet) -> None:
        assert self.daemon.term() == 0
        self.daemon.start()
        self.client = fleet.connect(self.daemon.url)


@pytest.fixture(scope="module")
def fleet_of_all() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


@pytest.fixture(scope="module")
def house(fleet_of_all: Fleet) -> Iterator[House]:
    with flag_maker() as flags:
        daemon = fleet_of_all.daemon(*flags())
        yield House(daemon, fleet_of_all.connect(daemon.url))
        fleet_of_all.close()


def name(doc: Document) -> str:
    return doc.hashes[-1].hex()


def test_units_are_listed_in_the_order_asked_for_and_by_tenant(house: House) -> None:
    one, two = house.store(1, "list-a"), house.store(2, "list-b")
    one.load(house.client)
    (shown,) = house.json("list", "--tenant", "list-a")
    assert (shown["unit"], shown["tokens"], shown["hits"], shown["kinds"]) == (
        name(one),
        256,
        1,
        ["request_end"],
    )
    assert (shown["model"], shown["nbytes"], shown["pins"]) == ("test", 4 * one.nbytes, [])
    listed = house.json("list", "--order", "hits", "--limit", "1")
    assert [each["unit"] for each in listed] == [name(one)]
    text = house.run("list", "--tenant", "list-b")
    assert name(two)[:12] in text
    assert name(one)[:12] not in text


def test_a_unit_is_shown_by_enough_of_its_name(house: House) -> None:
    doc = house.store(3)
    assert house.json("show", name(doc)[:10])["unit"] == name(doc)
    assert "request_end" in house.run("show", name(doc))


def test_a_pin_is_held_by_its_handle_over_a_restart(house: House, fleet_of_all: Fleet) -> None:
    doc = house.store(4, "pin")
    pin = house.json("pin", name(doc), "--for", "12h")
    assert pin["expires"] - pin["created"] == pytest.approx(12 * 3600)
    house.restart(fleet_of_all)
    assert house.json("list", "--pins", "--tenant", "pin") == [pin]
    assert pin["handle"] in house.run("list", "--pins")
    assert house.json("show", name(doc))["pins"] == [pin]
    longer = house.json("pin", "--handle", pin["handle"], "--for", "7d")
    assert longer["expires"] > pin["expires"]
    assert pin["handle"] in house.run("show", name(doc))
    assert "unpin it first" in house.run("delete", name(doc), code=2)
    assert pin["handle"] in house.run("unpin", pin["handle"])
    assert house.json("list", "--pins", "--tenant", "pin") == []
    assert "no pin has the handle" in house.run("unpin", pin["handle"], code=2)


def test_a_deleted_unit_is_a_miss_that_says_so(house: House) -> None:
    doc, other = house.store(5, "delete-unit"), house.store(6, "delete-unit")
    epoch = house.match(doc).epoch
    assert house.json("delete", name(doc)) == {"namespaces": 1, "blocks": 4}
    match = house.match(doc)
    assert (match.blocks, match.reason, match.epoch) == (0, MissReason.DELETED, epoch + 1)
    assert other.load(house.client) == 4
    assert "0 units have names" in house.run("show", name(doc), code=2)


def test_a_tenant_or_namespace_is_deleted_once_that_is_confirmed(house: House, fleet_of_all: Fleet) -> None:
    doc, other = house.store(7, "delete-a"), house.store(8, "delete-b")
    assert "Delete all of tenant 'delete-a'?" in house.run(
        "delete", "--tenant", "delete-a", code=1, answer="n\n"
    )
    assert house.match(doc).stored_blocks == 4
    assert "4 blocks are deleted" in house.run("delete", "--tenant", "delete-a", answer="y\n")
    assert house.json("delete", "--namespace", other.namespace.hex()[:16], "--yes")["blocks"] == 4
    house.restart(fleet_of_all)
    for each in (doc, other):
        assert document(house.client, 4, tenant="delete-a").namespace != document(house.client, 4).namespace
        assert house.match(each).stored_blocks == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("show", "zz"), "0 units have names that begin with 'zz'"),
        (("pin", "zz", "--for", "1d"), "0 units"),
        (("pin", "zz", "--for", "soon"), "write a time such as 90s"),
        (("pin", "--for", "1d"), "name a unit"),
        (("pin", "zz", "--handle", "h", "--for", "1d"), "not both"),
        (("pin", "--handle", "h", "--for", "1d"), "no pin has the handle 'h'"),
        (("delete",), "name one of a unit, --namespace and --tenant"),
        (("delete", "zz", "--tenant", "t"), "name one of"),
        (("delete", "--tenant", "nobody", "--yes"), "0 namespaces have tenant 'nobody'"),
        (("delete", "--namespace", "zz", "--yes"), "0 namespaces have digest 'zz'"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(house: House, words: tuple[str, ...], says: str) -> None:
    line = house.run(*words, code=2)
    assert says in line
    assert line.startswith("latentkv: ")
    assert line.count("\n") == 1


def test_a_daemon_that_is_away_is_exit_3(tmp_path) -> None:
    assert "no daemon answers" in latentkv("units", "list", "--listen", f"unix://{tmp_path}/kv.sock", code=3)


def test_a_daemon_that_does_not_answer_in_time_is_not_said_to_be_away(house: House) -> None:
    house.daemon.process.send_signal(signal.SIGSTOP)
    try:
        with Operator(house.daemon.url) as asked, pytest.raises(DeadlineExceeded, match="not answer within"):
            asked._ask(asked._stub.Report, pb.ReportRequest(), 0.5)
    finally:
        house.daemon.process.send_signal(signal.SIGCONT)


@pytest.fixture
def faulty_daemon(tmp_path) -> Iterator[str]:
    """The operators' service over nothing, so that whatever is asked of it ends in a fault of its own."""
    nothing = SimpleNamespace()
    started: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def serve() -> None:
        server, stop = grpc.aio.server(), asyncio.Event()
        service = OperatorService(nothing, nothing, nothing)  # type: ignore[arg-type]
        operator_pb2_grpc.add_OperatorServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(f"unix://{tmp_path}/kv.sock")
        await server.start()
        started.put((asyncio.get_running_loop(), stop))
        await stop.wait()
        await server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, stop = started.get(timeout=DEADLINE)
    yield f"unix://{tmp_path}/kv.sock"
    loop.call_soon_threadsafe(stop.set)
    thread.join(DEADLINE)


@pytest.mark.parametrize(
    ("words", "verb"),
    [
        (("units", "list"), "Units"),
        (("units", "list", "--pins"), "Pins"),
        (("units", "show", "aa"), "Unit"),
        (("units", "pin", "aa", "--for", "1d"), "Pin"),
        (("units", "unpin", "aa"), "Unpin"),
        (("units", "delete", "aa"), "Delete"),
        (("status",), "Report"),
        (("plan",), "Record"),
    ],
)
def test_a_fault_of_the_daemon_is_said_to_be_one_and_exit_4(faulty_daemon, words, verb) -> None:
    done = CliRunner().invoke(app, [*words, "--listen", faulty_daemon])
    assert done.exit_code == 4, done.output
    assert done.stderr == f"latentkv: {verb} failed in the daemon (AttributeError); see its log\n"
