"""Finding the daemon that a command is about, and asking it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from kvstore.errors import Unavailable
from kvstore.transport import error_of
from kvstore.v1 import operator_pb2 as pb
from kvstore.v1 import operator_pb2_grpc
from server.config import UNIX, ConfigError, default_listen, load

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


def ask_report(url: str) -> dict[str, Any]:
    """The daemon's report as ``server.report.Report`` has it. Raises ``Unavailable``."""
    target = f"unix:{url.removeprefix(UNIX)}" if url.startswith(UNIX) else url
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = operator_pb2_grpc.OperatorStub(channel)
        try:
            answer = stub.Report(pb.ReportRequest(), timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            raise Unavailable(f"no daemon answers at {url} ({error_of(error)}); is it running?") from None
    report: dict[str, Any] = json.loads(answer.report_json)
    return report
