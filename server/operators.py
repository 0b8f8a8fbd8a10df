"""The Operator service: what ``latentkv status`` and its like ask over the daemon's own socket."""
# ruff: noqa: N802  (gRPC names the methods)

from __future__ import annotations

import grpc

from kvstore.v1 import operator_pb2 as pb
from server.pages import Pages
from server.streams import Context

OPERATOR = pb.DESCRIPTOR.services_by_name["Operator"].full_name


class OperatorService:
    """Implements ``kvstore.v1.Operator``. It answers while the daemon drains, too."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:
        """Everything an operator may want to see."""
        report = self._pages.report()
        if report is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the store is being opened; ask again")
        return pb.ReportResponse(report_json=report.to_json())
