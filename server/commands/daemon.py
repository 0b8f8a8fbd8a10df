"""Finding the daemon that a command is about, and asking it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Annotated, Any, Self

import typer

from kvstore import wire
from kvstore.errors import DeadlineExceeded, InvalidArgument, Unavailable
from kvstore.identity import Identity
from kvstore.namespace import Namespace
from kvstore.transport import Transport
from kvstore.v1 import operator_pb2 as pb
from kvstore.v1 import operator_pb2_grpc
from server.config import listening
from server.explaining.explanation import Opened
from server.planning.trace import Trace, recorded_trace

ANSWER_SECONDS = 5.0
WORK_SECONDS = 600.0  # for what has to reach the disk

Url = Annotated[
    str | None,
    typer.Option(
        "--listen", help="Where the daemon listens. (LATENTKV_LISTEN, else its default)", show_default=False
    ),
]
Data = Annotated[
    str | None,
    typer.Option("--data", help="Its data directory, if the socket lies there.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def address(listen: str | None, data: str | None) -> str:
    """Where the daemon listens, by the same rules as ``serve``. Raises ``ConfigError``."""
    return listening(listen, data)


class Answer(dict[str, Any]):
    """An object of a daemon's answer. What it lacks is of a newer release; what nobody reads may be new."""

    def __missing__(self, name: str) -> Any:
        raise wire.NotUnderstood(
            f"the daemon's answer has no {name!r}: it is older than this command; upgrade the daemon, or ask"
            " with the command of its release"
        )


def _read(answer: str) -> Any:
    """Raises ``NotUnderstood``."""
    try:
        return json.loads(answer, object_hook=Answer)
    except ValueError as error:
        raise wire.NotUnderstood(
            f"the daemon's answer is no JSON ({error}); run the same release on both sides"
        ) from None


class Operator:
    """What a daemon answers to an operator. Its methods raise what the daemon does, and ``Unavailable``.

    Raises ``InvalidArgument`` for an identity of the environment that cannot be used.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._transport = Transport(url, ANSWER_SECONDS, Identity.from_environment())
        self._stub: Any = operator_pb2_grpc.OperatorStub(self._transport.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()

    def _ask(self, verb: Callable[..., Any], request: Any, seconds: float = ANSWER_SECONDS) -> Any:
        try:
            return self._transport.call(verb, request, seconds)
        except (wire.Unreachable, wire.NotAsked) as error:
            raise Unavailable(f"no daemon answers at {self._url} ({error}); is it running?") from None
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"the daemon at {self._url} did not answer within {seconds:g} s: it is stopped, or busy"
            ) from None

    def report(self) -> dict[str, Any]:
        """The daemon's report as ``server.report.Report`` has it."""
        report: dict[str, Any] = _read(self._ask(self._stub.Report, pb.ReportRequest()).report_json)
        return report

    def record(self) -> Trace:
        """The daemon's record of its last requests. Raises ``InvalidArgument`` if there is none."""

        def answers(request: Any, **options: Any) -> list[Any]:
            return list(self._stub.Record(request, **options))

        batches = self._ask(answers, pb.RecordRequest())
        return recorded_trace(
            (each.at, each.tokens, each.ids) for batch in batches for each in batch.requests
        )

    def namespaces(self) -> list[Opened]:
        """The open namespaces."""
        found: dict[bytes, Opened] = {}
        newer = after = 0
        while True:
            answer = self._ask(self._stub.Namespaces, pb.NamespacesRequest(after=after))
            for each in answer.namespaces:
                opened = _opened(each)
                if opened is None:
                    newer += 1
                else:
                    found[each.digest] = opened
            if answer.next <= after:  # the last, or a daemon that gives all at once
                break
            after = answer.next
        if newer:
            typer.echo(
                f"latentkv: {newer} namespaces are left out, for they are of a release newer than this"
                " command's; upgrade it",
                err=True,
            )
        return list(found.values())

    def trail(self, namespace: bytes, hashes: Sequence[bytes], tokens: int, align: int) -> dict[str, Any]:
        """A prompt's way through the index, as ``server.report.trail_report`` has it."""
        request = pb.TrailRequest(
            namespace=namespace,
            hashes=wire.join_hashes(hashes),
            tokens=wire.unsigned("tokens", tokens),
            align=wire.unsigned("align", align, 32),
        )
        trail: dict[str, Any] = _read(self._ask(self._stub.Trail, request).trail_json)
        return trail

    def units(self, tenant: str | None, order: str, limit: int) -> list[dict[str, Any]]:
        """The first units in an order, each a ``server.holdings.UnitHeld``."""
        request = pb.UnitsRequest(tenant=tenant, order=order, limit=wire.unsigned("limit", limit, 32))
        units: list[dict[str, Any]] = _read(self._ask(self._stub.Units, request).units_json)
        return units

    def unit(self, name: str) -> dict[str, Any]:
        """One unit, a ``server.holdings.UnitHeld``."""
        unit: dict[str, Any] = _read(self._ask(self._stub.Unit, pb.UnitRequest(unit=name)).unit_json)
        return unit

    def pins(self, tenant: str | None) -> list[dict[str, Any]]:
        """All pins, each a ``server.holdings.PinHeld``."""
        found: dict[str, dict[str, Any]] = {}
        while True:
            answer = self._ask(self._stub.Pins, pb.PinsRequest(tenant=tenant, first=len(found)))
            found |= {pin["handle"]: pin for pin in _read(answer.pins_json)}
            if not answer.more:
                return list(found.values())

    def pin(self, seconds: float, *, unit: str = "", handle: str = "") -> dict[str, Any]:
        """Pin a unit, or extend a pin; a ``server.holdings.PinHeld``."""
        request = pb.PinRequest(unit=unit, handle=handle, seconds=seconds)
        pin: dict[str, Any] = _read(self._ask(self._stub.Pin, request, WORK_SECONDS).pin_json)
        return pin

    def unpin(self, handle: str) -> None:
        """End a pin."""
        self._ask(self._stub.Unpin, pb.UnpinRequest(handle=handle))

    def delete(self, what: str, name: str) -> dict[str, int]:
        """Delete a ``unit``, a ``namespace`` or a ``tenant``; how many namespaces and blocks."""
        answer = self._ask(self._stub.Delete, pb.DeleteRequest(**{what: name}), WORK_SECONDS)
        return {"namespaces": answer.namespaces, "blocks": answer.blocks}


def _opened(message: pb.OpenNamespace) -> Opened | None:
    """None for a namespace that only a newer daemon understands."""
    try:
        return Opened(Namespace.from_json(message.namespace_json), message.digest)
    except InvalidArgument:
        return None
