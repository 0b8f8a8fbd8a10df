from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Worker(_message.Message):
    __slots__ = ("token", "mapped")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    mapped: bool
    def __init__(self, token: _Optional[bytes] = ..., mapped: bool = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("namespace_json",)
    NAMESPACE_JSON_FIELD_NUMBER: _ClassVar[int]
    namespace_json: str
    def __init__(self, namespace_json: _Optional[str] = ...) -> None: ...

class OpenNamespaceResponse(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("namespace", "hashes", "tokens", "align", "store", "counted")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALIGN_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    hashes: bytes
    tokens: int
    align: int
    store: bool
    counted: int
    def __init__(self, namespace: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., tokens: _Optional[int] = ..., align: _Optional[int] = ..., store: bool = ..., counted: _Optional[int] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("blocks", "host_blocks", "disk_blocks", "unit", "unit_blocks", "stored_blocks", "reason", "interval", "epoch", "persist_tokens", "persist_kinds")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    UNIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PERSIST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PERSIST_KINDS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    host_blocks: int
    disk_blocks: int
    unit: bytes
    unit_blocks: int
    stored_blocks: int
    reason: str
    interval: int
    epoch: int
    persist_tokens: _containers.RepeatedScalarFieldContainer[int]
    persist_kinds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blocks: _Optional[int] = ..., host_blocks: _Optional[int] = ..., disk_blocks: _Optional[int] = ..., unit: _Optional[bytes] = ..., unit_blocks: _Optional[int] = ..., stored_blocks: _Optional[int] = ..., reason: _Optional[str] = ..., interval: _Optional[int] = ..., epoch: _Optional[int] = ..., persist_tokens: _Optional[_Iterable[int]] = ..., persist_kinds: _Optional[_Iterable[int]] = ...) -> None: ...

class Readers(_message.Message):
    __slots__ = ("group", "count")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    group: bytes
    count: int
    def __init__(self, group: _Optional[bytes] = ..., count: _Optional[int] = ...) -> None: ...

class LoadStart(_message.Message):
    __slots__ = ("namespace", "hashes", "first", "worker", "readers", "counted")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    hashes: bytes
    first: int
    worker: Worker
    readers: Readers
    counted: int
    def __init__(self, namespace: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., first: _Optional[int] = ..., worker: _Optional[_Union[Worker, _Mapping]] = ..., readers: _Optional[_Union[Readers, _Mapping]] = ..., counted: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("start", "returned")
    START_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    start: LoadStart
    returned: Returned
    def __init__(self, start: _Optional[_Union[LoadStart, _Mapping]] = ..., returned: _Optional[_Union[Returned, _Mapping]] = ...) -> None: ...

class Returned(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class Announced(_message.Message):
    __slots__ = ("first", "offsets")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    first: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("block", "offset", "data", "checksum", "last")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    block: int
    offset: int
    data: bytes
    checksum: int
    last: bool
    def __init__(self, block: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ..., last: bool = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("announced", "chunk", "short", "lease")
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SHORT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    announced: Announced
    chunk: Chunk
    short: int
    lease: int
    def __init__(self, announced: _Optional[_Union[Announced, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., short: _Optional[int] = ..., lease: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("namespace", "parent", "hashes", "lease", "worker", "epoch")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    parent: bytes
    hashes: bytes
    lease: int
    worker: Worker
    epoch: int
    def __init__(self, namespace: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., lease: _Optional[int] = ..., worker: _Optional[_Union[Worker, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("lease", "states", "offsets")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    states: bytes
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease: _Optional[int] = ..., states: _Optional[bytes] = ..., offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class UploadRequest(_message.Message):
    __slots__ = ("lease", "hash", "data", "offset", "checksum", "last", "worker")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    lease: int
    hash: bytes
    data: bytes
    offset: int
    checksum: int
    last: bool
    worker: Worker
    def __init__(self, lease: _Optional[int] = ..., hash: _Optional[bytes] = ..., data: _Optional[bytes] = ..., offset: _Optional[int] = ..., checksum: _Optional[int] = ..., last: bool = ..., worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class UploadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnitMark(_message.Message):
    __slots__ = ("hash", "kinds")
    HASH_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    kinds: int
    def __init__(self, hash: _Optional[bytes] = ..., kinds: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("lease", "hashes", "units", "worker")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    lease: int
    hashes: bytes
    units: _containers.RepeatedCompositeFieldContainer[UnitMark]
    worker: Worker
    def __init__(self, lease: _Optional[int] = ..., hashes: _Optional[bytes] = ..., units: _Optional[_Iterable[_Union[UnitMark, _Mapping]]] = ..., worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    def __init__(self, ticket: _Optional[int] = ...) -> None: ...

class DurableRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    def __init__(self, ticket: _Optional[int] = ...) -> None: ...

class DurableResponse(_message.Message):
    __slots__ = ("durable",)
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    durable: bool
    def __init__(self, durable: bool = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease", "worker")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    lease: int
    worker: Worker
    def __init__(self, lease: _Optional[int] = ..., worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("used_bytes", "capacity_bytes", "blocks")
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    used_bytes: int
    capacity_bytes: int
    blocks: int
    def __init__(self, used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("host", "disk", "mode", "pinned", "dirty_blocks", "units", "leases", "namespaces", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HOST_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    DIRTY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    host: TierStatus
    disk: TierStatus
    mode: str
    pinned: bool
    dirty_blocks: int
    units: int
    leases: int
    namespaces: int
    counters: _containers.ScalarMap[str, int]
    def __init__(self, host: _Optional[_Union[TierStatus, _Mapping]] = ..., disk: _Optional[_Union[TierStatus, _Mapping]] = ..., mode: _Optional[str] = ..., pinned: bool = ..., dirty_blocks: _Optional[int] = ..., units: _Optional[int] = ..., leases: _Optional[int] = ..., namespaces: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...
