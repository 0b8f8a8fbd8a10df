"""Finding the daemon that a command is about, and asking it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import grpc
import typer

from kvstore import wire
from kvstore.errors import Unavailable
from kvstore.namespace import Namespace
from kvstore.transport import error_of
from kvstore.v1 import operator_pb2 as pb
from kvstore.v1 import operator_pb2_grpc
from server.config import UNIX, ConfigError, default_listen, load
from server.explaining.explanation import Opened

ANSWER_SECONDS = 5.0

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
    if listen is not None and data is None:
        return load({"listen": listen, "data": "."}).address
    if data is not None:
        return load({"listen": listen, "data": data}).address
    try:
        return load({}).address
    except ConfigError:  # no data directory is known: only the user's runtime directory is left
        return default_listen(Path())


class Operator:
    """What a daemon answers to an operator. Its methods raise what the daemon does, and ``Unavailable``."""

    def __init__(self, url: str) -> None:
        self._url = url
        target = f"unix:{url.removeprefix(UNIX)}" if url.startswith(UNIX) else url
        options = (
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
        )
        self._channel = grpc.insecure_channel(target, options=options)
        self._stub: Any = operator_pb2_grpc.OperatorStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def _ask(self, verb: Callable[..., Any], request: Any) -> Any:
        try:
            return verb(request, timeout=ANSWER_SECONDS)
        except grpc.RpcError as failure:
            error = error_of(failure)
            if isinstance(error, Unavailable):
                error = Unavailable(f"no daemon answers at {self._url} ({error}); is it running?")
            raise error from None

    def report(self) -> dict[str, Any]:
        """The daemon's report as ``server.report.Report`` has it."""
        report: dict[str, Any] = json.loads(self._ask(self._stub.Report, pb.ReportRequest()).report_json)
        return report

    def namespaces(self) -> list[Opened]:
        """The open namespaces."""
        answer = self._ask(self._stub.Namespaces, pb.NamespacesRequest())
        return [Opened(Namespace.from_json(each.namespace_json), each.digest) for each in answer.namespaces]

    def trail(self, namespace: bytes, hashes: Sequence[bytes], tokens: int, align: int) -> dict[str, Any]:
        """A prompt's way through the index, as ``server.report.trail_report`` has it."""
        request = pb.TrailRequest(
            namespace=namespace,
            hashes=wire.join_hashes(hashes),
            tokens=wire.unsigned("tokens", tokens),
            align=wire.unsigned("align", align, 32),
        )
        trail: dict[str, Any] = json.loads(self._ask(self._stub.Trail, request).trail_json)
        return trail
