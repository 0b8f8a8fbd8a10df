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
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenNamespace(_message.Message):
    __slots__ = ("namespace_json", "digest")
    NAMESPACE_JSON_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    namespace_json: str
    digest: bytes
    def __init__(self, namespace_json: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class NamespacesResponse(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[OpenNamespace]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[OpenNamespace, _Mapping]]] = ...) -> None: ...

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
