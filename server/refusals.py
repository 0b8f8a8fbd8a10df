"""How a call is refused: one status for each error, counted and logged."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

import grpc

from kvstore import wire
from kvstore.errors import KVStoreError
from server.events import Occasional, event
from server.streams import Context
from server.tally import Tally

log = logging.getLogger(__name__)
_refusals = Occasional(log)  # kinds are statuses: a peer chooses neither them nor the verbs


async def refuse(tally: Tally, verb: str, context: Context, failure: KVStoreError) -> NoReturn:
    """End the call with the failure's status."""
    failure.__traceback__ = failure.__context__ = None  # their frames hold the request, and one holds it
    code, details, trailing = wire.status_of_error(failure)
    tally.answered(verb, code.name)
    said = {"verb": verb, "status": code.name, "error": type(failure).__name__}
    _refusals.event(logging.INFO, "call_refused", kind=code.name, **said)
    event(log, logging.DEBUG, "call_refused_because", verb=verb, details=details)
    try:
        await context.abort(code, details, trailing)
    except grpc.aio.InternalError:  # there is nobody to be told any more
        raise asyncio.CancelledError from None
