"""One class per outcome that a caller can act on.

Every message says what was wrong, with which value, and what to do. The daemon
maps each class to one gRPC status (see ``kvstore.wire``) and the client maps it
back, so embedded and remote callers catch the same classes.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of everything this package raises on purpose."""


class InvalidArgument(KVStoreError, ValueError):
    """A value in the call is malformed; nothing was changed. Fix the call."""


class InvalidTokens(InvalidArgument):
    """Token ids are negative, beyond u32, not integers, or the prompt is empty."""


class NotMLA(InvalidArgument):
    """A model configuration does not describe an MLA model that can be cached."""


class CapacityTooSmall(InvalidArgument):
    """A tier's byte capacity cannot hold a single block of a layout."""


class NamespaceLimit(KVStoreError):
    """The tenant, the caller or the store has as many namespaces or sizes of blocks open as it may have."""


class NotCovered(KVStoreError):
    """The caller's credential does not cover the tenant or service, whether that exists or not."""


class NamespaceUnknown(KVStoreError):
    """The digest names no namespace of this store. Call ``open_namespace`` again."""


class NamespaceMismatch(KVStoreError):
    """A block or lease belongs to another namespace than the call names."""


class LeaseUnknown(KVStoreError):
    """The lease expired, was released, or belongs to another worker. Reserve again."""


class NotReserved(KVStoreError):
    """A commit names a block that this lease did not reserve, or already committed."""


class StillWritten(InvalidArgument):
    """A block to be committed can still be written through its view. Drop what looks at it, commit again."""


class ParentMissing(KVStoreError):
    """The chain up to the first block is not stored. Reserve from the first block."""


class UnitUnknown(KVStoreError):
    """No unit has this name, or more than one begins so. List the units and name one."""


class UnitPinned(KVStoreError):
    """A pinned unit cannot be deleted. Unpin it first."""


class PinUnknown(KVStoreError):
    """No pin has this handle: it never had, was dropped, or has expired."""


class PinLimit(KVStoreError):
    """Pins keep as much of the disk as they may. Unpin others, or raise ``pin_share``."""


class EpochPassed(KVStoreError):
    """Something of the namespace was deleted since these blocks were made. Match again."""


class TicketUnknown(KVStoreError):
    """The ticket was never given out by this store, or is too old to be remembered."""


class CorruptBlock(KVStoreError):
    """A payload did not verify. Always turned into a miss and counted."""


class BadPlace(CorruptBlock):
    """A payload could not be read where it lies, while others can: it is lost, and so is the place."""


class DiskError(KVStoreError):
    """The DISK tier could not do it (full, failing, damaged); nothing was changed. Free or retry later."""


class DataDirError(KVStoreError):
    """The data directory cannot be used."""


class DataDirInUse(DataDirError):
    """Another process has this data directory open."""


class DataDirReadOnly(DataDirError):
    """The data directory cannot be written."""


class FormatMismatch(DataDirError):
    """The data directory was written by another format version."""


class ArenaUnavailable(KVStoreError):
    """The host arena could not be allocated, or could not be mapped by a worker."""


class Unavailable(KVStoreError):
    """The store cannot be reached or is shutting down. Treated as a miss."""


class LimitReached(Unavailable):
    """The caller has as many of something as one caller may; others go on. Give some back, or use fewer."""


class Forked(Unavailable):
    """The store or client belongs to the parent process. Treated as a miss; open or connect in the child."""


class Unauthenticated(Unavailable):
    """The daemon serves only callers whom it knows, and this one proved nothing. Treated as a miss."""


class DeadlineExceeded(Unavailable):
    """The store did not answer in time. Treated as a miss."""
