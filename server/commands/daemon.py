"""Finding the daemon that a command is about, and asking it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.errors import Unauthenticated, Unavailable
from kvstore.identity import Identity
from kvstore.transport import Transport
from kvstore.v1 import operator_pb2 as pb
from kvstore.v1 import operator_pb2_grpc
from server.config import ConfigError, default_listen, load

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
    if listen is not None:
        return listen
    if data is not None:
        return load({"data": data}).address
    try:
        return load({}).address
    except ConfigError:  # no data directory is known: only the user's runtime directory is left
        return default_listen(Path())


def ask_report(url: str) -> dict[str, Any]:
    """The daemon's report as ``server.report.Report`` has it.

    Raises ``Unavailable``, ``Unauthenticated``, ``NotCovered``, and ``InvalidArgument`` for an identity
    of the environment that cannot be used.
    """
    with contextlib.closing(Transport(url, ANSWER_SECONDS, Identity.from_environment())) as transport:
        stub: Any = operator_pb2_grpc.OperatorStub(transport.channel)
        try:
            answer = transport.call(stub.Report, pb.ReportRequest())
        except Unauthenticated:
            raise
        except Unavailable as error:
            raise Unavailable(f"no daemon answers at {url} ({error}); is it running?") from None
    report: dict[str, Any] = json.loads(answer.report_json)
    return report
