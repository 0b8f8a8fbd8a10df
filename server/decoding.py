"""Bytes to requests: only for a caller who is known, one message at a time, each bounded.

gRPC would read and parse a unary request before anybody has looked who calls. So each method is
served as one that takes a stream of bytes: nothing is read until an interceptor before this one has
let the call through, and what is read is counted before it is parsed. Parsing is done on the
event loop, so no two messages are parsed at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from kvstore import wire
from kvstore.errors import DeadlineExceeded, InvalidArgument, KVStoreError, LimitReached
from server.access import caller_or_nobody
from server.credentials import DEFAULT_DOMAIN, Caller
from server.interception import Wrapping
from server.operators import OPERATOR
from server.receiving import Reception
from server.refusals import refuse
from server.scanning import require_modest
from server.streams import Context
from server.tally import Tally

SMALL_MESSAGE_BYTES = 1 << 16
_LARGE = {  # verbs whose messages name many blocks, or bring their bytes
    f"{wire.SERVICE}/{verb}" for verb in ("OpenNamespace", "Match", "Load", "Reserve", "Upload", "Commit")
} | {f"{OPERATOR}/Trail"}


@dataclass(frozen=True, slots=True)
class _Verb:
    """A method, and what its requests are."""

    name: str
    request: Descriptor
    parse: Callable[[bytes], Any]
    most_bytes: int

    @property
    def patient(self) -> bool:
        """Whether messages behind the first may take as long as they like."""
        return self.name == "Load"

    def decode(self, data: bytes) -> Any:
        """The request in these bytes. Raises ``InvalidArgument``."""
        if len(data) > self.most_bytes:
            raise InvalidArgument(
                f"{len(data)} bytes are no message of {self.name}; send at most {self.most_bytes}"
            )
        require_modest(data, self.request)
        try:
            return self.parse(data)
        except DecodeError as error:
            raise InvalidArgument(
                f"what came is no message of {self.name} ({error}); use the published proto, uncompressed"
            ) from None


class Decoding(Wrapping):
    """Reads and parses the requests of every service."""

    def __init__(self, tallies: Mapping[str, Tally], seconds: float) -> None:
        """Refusals are counted in their domain's tally. A message may take ``seconds`` to come in."""
        super().__init__()
        self._tallies = tallies
        self._seconds = seconds
        self._receptions: dict[Caller | str, Reception] = {}  # a verb's name: of services for everyone

    def wrap(self, handler: Any, service: str, verb: str) -> Any:
        """See ``Wrapping``."""
        method = descriptor_pool.Default().FindServiceByName(service).FindMethodByName(verb)
        large = f"{service}/{verb}" in _LARGE
        limit = wire.MAX_MESSAGE_BYTES if large else SMALL_MESSAGE_BYTES
        of = _Verb(verb, method.input_type, handler.request_deserializer, limit)
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(self._answering(handler, of), response_serializer=handler.response_serializer)

    def _answering(self, handler: Any, verb: _Verb) -> Callable[[Any, Context], Awaitable[Any]]:
        behind = next(
            each
            for each in (
                handler.unary_unary,
                handler.unary_stream,
                handler.stream_unary,
                handler.stream_stream,
            )
            if each is not None
        )

        async def answer(_: Any, context: Context) -> Any:
            try:
                with self._received(verb) as reception:
                    requests = Requests(verb, context, reception)
                    return await self._served(behind, requests, context, single=not handler.request_streaming)
            except LimitReached as error:
                await self._refuse(verb.name, context, error)
            except grpc.aio.AbortError as aborted:
                # gRPC keeps it with the call, which its frames hold, and the request with it: only a
                # collection would free them, and there may be much refused until then.
                raise aborted.with_traceback(None) from None

        return answer

    async def _served(self, behind: Any, requests: Requests, context: Context, *, single: bool) -> Any:
        try:
            request = await requests.only() if single else requests
            return await _answered(behind(request, context), context)
        except KVStoreError as error:  # of the request: a service answers what it raises itself
            await self._refuse(requests.verb, context, error)

    async def _refuse(self, verb: str, context: Context, error: KVStoreError) -> NoReturn:
        who = caller_or_nobody()
        tally = self._tallies[DEFAULT_DOMAIN if who is None else who.domain]
        await refuse(tally, verb, context, error)

    @contextmanager
    def _received(self, verb: _Verb) -> Iterator[Reception]:
        """Where the messages of this call's caller come in, with one more call."""
        who = caller_or_nobody() or verb.name  # so that streams of strangers keep no check of health out
        reception = self._receptions.setdefault(who, Reception(self._seconds))
        try:
            with reception.call():
                yield reception
        finally:
            if not reception.calls:  # credentials come and go
                self._receptions.pop(who, None)


class Requests:
    """The requests of a call as they come, for whoever answers it.

    The first has to come soon, and so has each of an Upload. A Load's credits have their time: a
    worker gives slots back when it is done with them.
    """

    def __init__(self, verb: _Verb, context: Context, reception: Reception) -> None:
        self._verb = verb
        self._context = context
        self._reception = reception
        self._begun = False

    @property
    def verb(self) -> str:
        """What is called."""
        return self._verb.name

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Raises ``InvalidArgument``, ``DeadlineExceeded``."""
        if self._begun and self._verb.patient:
            data = await self._context.read()
        else:
            data = await self._soon()
        self._begun = True
        if not isinstance(data, bytes):  # gRPC's mark of the end
            raise StopAsyncIteration
        return self._verb.decode(data)

    async def only(self) -> Any:
        """The request of a call that has one. Raises as ``__anext__``."""
        async for request in self:
            return request
        raise InvalidArgument(f"a call of {self._verb.name} without a message; send one")

    async def _soon(self) -> Any:
        try:
            async with self._reception.place():
                return await self._context.read()
        except TimeoutError:
            raise DeadlineExceeded(
                f"no whole message of {self._verb.name} came within {self._reception.seconds:g} s; send it at"
                " once"
            ) from None


async def _answered(answering: Any, context: Context) -> Any:
    """What a handler returns, or writes, or yields."""
    if not inspect.isasyncgen(answering):
        return await answering
    async for response in answering:
        await context.write(response)
    return None
