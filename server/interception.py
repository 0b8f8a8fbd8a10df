"""Interceptors that stand before a service's handlers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

import grpc


class Wrapping(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Puts something around each handler, once: a method's handler is the same in every call."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Any] = {}  # method -> handler

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See ``grpc.aio.ServerInterceptor``."""
        method = handler_call_details.method
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:  # there is no such method; what it is called must not be remembered
                return self.instead(method.rpartition("/")[0].removeprefix("/"))
            _, service, verb = method.split("/")
            self._wrapped[method] = self.wrap(handler, service, verb)
        return self._wrapped[method]

    @abstractmethod
    def wrap(self, handler: Any, service: str, verb: str) -> Any:
        """The handler of a service's verb, with what stands before it."""

    def instead(self, service: str) -> Any:
        """What answers a verb that the service has not; None leaves it to gRPC."""
        return None
