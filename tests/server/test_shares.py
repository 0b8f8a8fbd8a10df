"""What one caller may have: at its limit it is told its own numbers, and others go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import kvstore
from kvstore.errors import LimitReached
from kvstore.hashing import ROOT
from kvstore.identity import Identity
from kvstore.settings import StoreSettings
from kvstore.store import Store
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import kvstore_pb2_grpc
from server import receiving, workers
from server.credentials import Caller, hash_of, new_token
from server.receiving import Reception
from server.workers import MAX_MAPPED, MAX_REMOTE, Worker, WorkerTable
from tests.server.conftest import DEADLINE, ROOT_DIR, DaemonProcess, Fleet, document, flag_maker, start
from tests.server.test_failures import until
from tests.server.test_tenants import entry

GREEDY, MODEST = Caller("greedy", frozenset({"a"})), Caller("modest", frozenset({"b"}))


def tabled(
    test: Callable[[WorkerTable, Store, pytest.MonkeyPatch], Awaitable[None]],
) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """The test on a loop, with the workers of an open store."""

    def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def opened() -> None:
            sizes = {"host_bytes": 16 << 20, "disk_bytes": 64 << 20}
            store = await Store.open(StoreSettings(data=tmp_path / "data", **sizes))
            try:
                await test(WorkerTable(store, idle_seconds=60.0), store, monkeypatch)
            finally:
                await store.close()

        asyncio.run(opened())

    return run


def remote(caller: Caller, number: int) -> Worker:
    return Worker(caller, number.to_bytes(16, "big"), mapped=False)


def lease(table: WorkerTable, store: Store, worker: Worker) -> None:
    """As a Reserve of nothing."""
    store._leases.open(table.lessee(worker), 1, 1, time.monotonic())


@tabled
async def test_workers_that_hold_leases_are_so_many_of_one_caller(
    table: WorkerTable, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MAX_REMOTE):
        lease(table, store, remote(GREEDY, number))
    with pytest.raises(LimitReached, match=f"{MAX_REMOTE} workers of this caller"):
        table.holder(remote(GREEDY, MAX_REMOTE))
    assert table.holder(remote(GREEDY, 0)).leases
    lease(table, store, remote(MODEST, 0))


@tabled
async def test_workers_that_hold_nothing_make_room(
    table: WorkerTable, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MAX_REMOTE + 2):
        table.holder(remote(GREEDY, number))


@tabled
async def test_leases_are_so_many_of_one_caller_however_many_workers_it_makes_up(
    table: WorkerTable, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MAX_CALLER_LEASES", 8)
    for number in range(8):
        lease(table, store, remote(GREEDY, number))
    with pytest.raises(LimitReached, match="the workers of this caller hold 8 leases"):
        lease(table, store, remote(GREEDY, 99))
    lease(table, store, remote(MODEST, 0))


@tabled
async def test_open_loads_name_so_many_blocks_of_one_caller(
    table: WorkerTable, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MAX_LOADING", 100)
    with table.loading(remote(GREEDY, 1), 60):
        refused = pytest.raises(LimitReached, match="open loads of this caller name 60 blocks, and 41 more")
        with refused, table.loading(remote(GREEDY, 2), 41):
            pass
        with table.loading(remote(GREEDY, 2), 40), table.loading(remote(MODEST, 2), 100):
            pass
    with table.loading(remote(GREEDY, 3), 100):
        pass


@tabled
async def test_a_caller_who_has_nothing_is_forgotten(
    table: WorkerTable, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.holder(remote(GREEDY, 1))
    holder = table.admit(MODEST, 7)
    table.dismiss(holder)
    assert set(table._shares) == {GREEDY}
    table.sweep(time.monotonic() + 61.0)
    assert not table._shares


@tabled
async def test_a_stalled_call_makes_room_for_one_that_comes_when_there_are_enough(
    table: WorkerTable, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "MAX_CALLS", 2)
    reception, inside = Reception(DEADLINE), asyncio.Event()

    async def stall() -> None:
        with reception.call():
            async with reception.place():
                inside.set()
                await asyncio.Event().wait()

    stalled = asyncio.create_task(stall())
    await inside.wait()
    with reception.call(), reception.call():
        with pytest.raises(TimeoutError):
            await stalled
        with pytest.raises(LimitReached, match="2 calls of this caller"), reception.call():
            pass
    assert reception.calls == 0


@tabled
async def test_a_slow_sender_gives_up_its_place_to_those_who_wait(
    table: WorkerTable, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "PLACES", 1)
    monkeypatch.setattr(receiving, "PATIENCE", 0.0)
    reception, inside = Reception(DEADLINE), asyncio.Event()

    async def stall() -> None:
        async with reception.place():
            inside.set()
            await asyncio.Event().wait()

    stalled = asyncio.create_task(stall())
    await inside.wait()
    async with reception.place():
        with pytest.raises(TimeoutError):
            await stalled


# --- a daemon


@pytest.fixture(scope="module")
def tokens() -> dict[str, str]:
    return {name: new_token() for name in ("greedy", "modest")}


@pytest.fixture(scope="module")
def daemon(tokens: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    fleet, file = Fleet(), tmp_path_factory.mktemp("shares") / "credentials.toml"
    file.write_text(
        "".join(entry(name, f"token_sha256 = '{hash_of(token)}'", [name]) for name, token in tokens.items())
        + entry("here", f"uid = {os.getuid()}", ["here"])
    )
    with flag_maker() as flags:
        yield start(fleet, "mapped", flags, credentials=file)
        fleet.close()


def test_one_token_takes_no_other_callers_workers(daemon: DaemonProcess, tokens: dict[str, str]) -> None:
    client = kvstore.connect(daemon.url, timeout=DEADLINE, identity=Identity(tokens["greedy"]))
    doc = document(client, 2, tenant="greedy")
    proof = (("authorization", f"Bearer {tokens['greedy']}"),)
    with grpc.insecure_channel(daemon.url.replace("unix://", "unix:")) as channel:
        stub = kvstore_pb2_grpc.KVStoreStub(channel)

        def reserve(number: int) -> Any:
            worker = pb.Worker(token=number.to_bytes(16, "big"))
            request = pb.ReserveRequest(namespace=doc.namespace, parent=ROOT, worker=worker)
            return stub.Reserve(request, timeout=DEADLINE, metadata=proof)

        for number in range(MAX_REMOTE):
            reserve(number)
        with pytest.raises(grpc.RpcError) as raised:
            reserve(MAX_REMOTE)
        failure: Any = raised.value
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{MAX_REMOTE} workers of this caller" in failure.details()
    client.close()
    other = kvstore.connect(daemon.url, timeout=DEADLINE, identity=Identity(tokens["modest"]))
    mine = document(other, 3, tenant="modest")
    mine.store(other)
    assert mine.load(other) == 3
    other.close()


def test_the_handover_socket_takes_so_many_of_one_caller(daemon: DaemonProcess) -> None:
    def connect() -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.connect(str(daemon.arena_socket))
        made.settimeout(DEADLINE)
        return made

    def greeted() -> bool:
        with connect() as one:
            return one.recv(1) != b""

    before = len(daemon.log)
    with contextlib.ExitStack() as held:
        for _ in range(MAX_MAPPED):
            assert held.enter_context(connect()).recv(1) == b"{"
        assert not any(greeted() for _ in range(50))
    until(greeted)
    refused = [line for line in daemon.log[before:] if "event=worker_refused" in line]
    assert 0 < len(refused) < 30
    assert "processes of this caller are connected already" in refused[0]


LEAVES_ITS_CONNECTION = """
import json, socket, sys
with socket.socket(socket.AF_UNIX) as connection, socket.socket(fileno=int(sys.argv[2])) as parent:
    connection.connect(sys.argv[1])
    hello = connection.recv(4096)
    socket.send_fds(parent, [hello], [connection.fileno()])
    parent.recv(1)
"""


def test_a_handover_token_proves_nothing_once_its_process_has_ended(daemon: DaemonProcess) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [
            sys.executable,
            "-c",
            LEAVES_ITS_CONNECTION,
            str(daemon.arena_socket),
            str(theirs.fileno()),
        ]
        process = subprocess.Popen(command, cwd=ROOT_DIR, pass_fds=[theirs.fileno()])
        hello, (connection,), _, _ = socket.recv_fds(ours, 4096, 1)
        token = hello.decode().split('"worker": "')[1].split('"')[0]

        def proves() -> bool:
            with grpc.insecure_channel(daemon.url.replace("unix://", "unix:")) as channel:
                stub = kvstore_pb2_grpc.KVStoreStub(channel)
                try:
                    stub.Status(pb.StatusRequest(), timeout=DEADLINE, metadata=(("latentkv-worker", token),))
                except grpc.RpcError as failure:
                    known: Any = failure
                    assert known.code() is grpc.StatusCode.UNAUTHENTICATED
                    return False
                return True

        assert proves()
        ours.send(b"x")
        assert process.wait(DEADLINE) == 0
        until(lambda: not proves())  # though its connection is open yet: we have it
        os.close(connection)
