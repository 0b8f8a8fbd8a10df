from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("report_json",)
    REPORT_JSON_FIELD_NUMBER: _ClassVar[int]
    report_json: str
    def __init__(self, report_json: _Optional[str] = ...) -> None: ...

class NamespacesRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class OpenNamespace(_message.Message):
    __slots__ = ("namespace_json", "digest")
    NAMESPACE_JSON_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    namespace_json: str
    digest: bytes
    def __init__(self, namespace_json: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class NamespacesResponse(_message.Message):
    __slots__ = ("namespaces", "next")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[OpenNamespace]
    next: int
    def __init__(self, namespaces: _Optional[_Iterable[_Union[OpenNamespace, _Mapping]]] = ..., next: _Optional[int] = ...) -> None: ...

class TrailRequest(_message.Message):
    __slots__ = ("namespace", "hashes", "tokens", "align")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALIGN_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    hashes: bytes
    tokens: int
    align: int
    def __init__(self, namespace: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., tokens: _Optional[int] = ..., align: _Optional[int] = ...) -> None: ...

class TrailResponse(_message.Message):
    __slots__ = ("trail_json",)
    TRAIL_JSON_FIELD_NUMBER: _ClassVar[int]
    trail_json: str
    def __init__(self, trail_json: _Optional[str] = ...) -> None: ...

class UnitsRequest(_message.Message):
    __slots__ = ("tenant", "order", "limit")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    order: str
    limit: int
    def __init__(self, tenant: _Optional[str] = ..., order: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class UnitsResponse(_message.Message):
    __slots__ = ("units_json",)
    UNITS_JSON_FIELD_NUMBER: _ClassVar[int]
    units_json: str
    def __init__(self, units_json: _Optional[str] = ...) -> None: ...

class UnitRequest(_message.Message):
    __slots__ = ("unit",)
    UNIT_FIELD_NUMBER: _ClassVar[int]
    unit: str
    def __init__(self, unit: _Optional[str] = ...) -> None: ...

class UnitResponse(_message.Message):
    __slots__ = ("unit_json",)
    UNIT_JSON_FIELD_NUMBER: _ClassVar[int]
    unit_json: str
    def __init__(self, unit_json: _Optional[str] = ...) -> None: ...

class PinsRequest(_message.Message):
    __slots__ = ("tenant", "first")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    first: int
    def __init__(self, tenant: _Optional[str] = ..., first: _Optional[int] = ...) -> None: ...

class PinsResponse(_message.Message):
    __slots__ = ("pins_json", "more")
    PINS_JSON_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    pins_json: str
    more: bool
    def __init__(self, pins_json: _Optional[str] = ..., more: bool = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("unit", "handle", "seconds")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    unit: str
    handle: str
    seconds: float
    def __init__(self, unit: _Optional[str] = ..., handle: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pin_json",)
    PIN_JSON_FIELD_NUMBER: _ClassVar[int]
    pin_json: str
    def __init__(self, pin_json: _Optional[str] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: str
    def __init__(self, handle: _Optional[str] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("unit", "namespace", "tenant")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    unit: str
    namespace: str
    tenant: str
    def __init__(self, unit: _Optional[str] = ..., namespace: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("namespaces", "blocks")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    namespaces: int
    blocks: int
    def __init__(self, namespaces: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecordedRequest(_message.Message):
    __slots__ = ("at", "tokens", "ids")
    AT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    at: float
    tokens: int
    ids: bytes
    def __init__(self, at: _Optional[float] = ..., tokens: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...

class RecordResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RecordedRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[RecordedRequest, _Mapping]]] = ...) -> None: ...
