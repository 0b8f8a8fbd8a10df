"""Requests that are no message of their verb: they reach the service, which refuses and counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvstore import wire
from server.interception import Wrapping

_Deserialize = Callable[[bytes], Any]


class Decoding(Wrapping):
    """Makes a ``DecodeError`` of a unary request the request itself.

    gRPC would answer UNKNOWN and write a traceback for each. In a stream the error comes where
    the service reads it.
    """

    def wrap(self, handler: Any, service: str, verb: str) -> Any:
        """See ``Wrapping``."""
        if handler.unary_unary is None or service != wire.SERVICE:
            return handler
        return grpc.unary_unary_rpc_method_handler(
            handler.unary_unary,
            request_deserializer=_error_or(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _error_or(deserialize: _Deserialize) -> _Deserialize:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error

    return read
