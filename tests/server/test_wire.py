"""What crosses the wire arrives as it was sent, or is refused by name."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import errors, wire
from kvstore.api import Match, MissReason, Status, TierStatus
from kvstore.errors import InvalidArgument, KVStoreError
from kvstore.hashing import HASH_BYTES
from kvstore.units import PersistPoint, UnitKind, UnitMark
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import kvstore_pb2_grpc
from server.record import RequestRecord
from server.service import KVStoreService, answered
from server.tally import Tally

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, KVStoreError)]
COUNTS = st.integers(0, (1 << 32) - 1)
KINDS = st.integers(1, 7).map(UnitKind)
HASHES = st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES)


@pytest.mark.parametrize("cls", [*CLASSES, wire.StaleWorker, wire.DaemonFailed])
def test_every_error_crosses_as_its_class_with_its_message(cls: type[KVStoreError]) -> None:
    code, details, trailing = wire.status_of_error(cls("what was wrong"))
    error = wire.error_of_status(code, details, trailing)
    assert type(error) is cls
    assert str(error) == "what was wrong"
    assert code is not grpc.StatusCode.OK


def test_an_error_without_a_class_of_ours_crosses_as_its_nearest_base() -> None:
    class Special(errors.LeaseUnknown):
        pass

    code, _, trailing = wire.status_of_error(Special("gone"))
    assert code is grpc.StatusCode.NOT_FOUND
    assert type(wire.error_of_status(code, "gone", trailing)) is errors.LeaseUnknown


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_a_failure_of_the_transport_is_unavailable(code: grpc.StatusCode) -> None:
    error = wire.error_of_status(code, "details", ())
    assert isinstance(error, errors.Unavailable)
    assert isinstance(error, errors.DeadlineExceeded) == (code is grpc.StatusCode.DEADLINE_EXCEEDED)


@given(
    st.builds(
        Match,
        blocks=COUNTS,
        host_blocks=COUNTS,
        disk_blocks=COUNTS,
        unit=st.none() | HASHES,
        unit_blocks=COUNTS,
        stored_blocks=COUNTS,
        reason=st.sampled_from(MissReason),
        persist_points=st.lists(st.builds(PersistPoint, COUNTS, KINDS)).map(tuple),
        interval=COUNTS,
    )
)
def test_a_match_crosses_unchanged(match: Match) -> None:
    blob = wire.match_response(match).SerializeToString()
    assert wire.match_of(pb.MatchResponse.FromString(blob)) == match


@given(
    st.builds(
        Status,
        host=st.builds(TierStatus, COUNTS, COUNTS, COUNTS),
        disk=st.builds(TierStatus, COUNTS, COUNTS, COUNTS),
        mode=st.sampled_from(["ok", "host_only"]),
        pinned=st.booleans(),
        dirty_blocks=COUNTS,
        units=COUNTS,
        leases=COUNTS,
        namespaces=COUNTS,
        counters=st.dictionaries(st.text("abc_"), COUNTS),
    )
)
def test_a_status_crosses_unchanged(status: Status) -> None:
    blob = wire.status_response(status).SerializeToString()
    assert wire.status_of(pb.StatusResponse.FromString(blob)) == status


@given(st.lists(HASHES), st.lists(st.builds(UnitMark, HASHES, KINDS)))
def test_hashes_and_marks_cross_unchanged(hashes: list[bytes], units: list[UnitMark]) -> None:
    assert wire.hashes_of(wire.join_hashes(hashes)) == hashes
    assert wire.marks_of(wire.marks(units)) == units


@given(st.binary(max_size=200))
def test_hashes_of_a_wrong_length_are_refused(blob: bytes) -> None:
    if len(blob) % HASH_BYTES:
        with pytest.raises(InvalidArgument, match=str(len(blob))):
            wire.hashes_of(blob)
    if len(blob) != HASH_BYTES:
        with pytest.raises(InvalidArgument):
            wire.join_hashes([blob])


def test_what_is_out_of_bounds_is_refused_on_either_side() -> None:
    with pytest.raises(InvalidArgument, match="131073"):
        wire.join_hashes([bytes(32)] * (wire.MAX_HASHES + 1))
    with pytest.raises(InvalidArgument, match="at most"):
        wire.hashes_of(bytes(32) * (wire.MAX_HASHES + 1))
    with pytest.raises(InvalidArgument, match="tokens=-1"):
        wire.match_request(bytes(32), [], -1, align=64, store=False, counted=0)
    with pytest.raises(InvalidArgument, match="5 bytes"):
        wire.worker_of(pb.Worker(token=b"short"))
    with pytest.raises(InvalidArgument, match="0x8"):
        wire.marks_of([pb.UnitMark(hash=bytes(32), kinds=8)])


class BrokenService(KVStoreService):
    """A handler with a bug."""

    @answered
    async def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusResponse:
        raise ZeroDivisionError("a secret of the daemon")


def test_an_unexpected_failure_is_internal_counted_logged_and_costs_one_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tally = Tally()

    async def call() -> grpc.aio.AioRpcError:
        server = grpc.aio.server()
        kvstore_pb2_grpc.add_KVStoreServicer_to_server(
            BrokenService(None, None, tally, RequestRecord(0), read_seconds=1.0), server
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await kvstore_pb2_grpc.KVStoreStub(channel).Status(pb.StatusRequest())
        await server.stop(None)
        return failed.value

    with caplog.at_level(logging.INFO):
        error = asyncio.run(call())
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")
    assert "ZeroDivisionError" in caplog.text
    assert tally.call_counters() == {"rpc_status_internal": 1}
