"""Which workers the daemon knows. Owned by the event loop.

A mapped worker is known while its handover connection lives. Any other is known by a
token of its own making, from its first call until it was silent for ``idle_seconds``;
everything it held has expired by then. A worker is its caller's: the same token from
another caller names another worker, or none.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore.errors import LimitReached, NotReserved
from kvstore.leases import Holder
from kvstore.store import Store
from kvstore.wire import TOKEN_BYTES, StaleWorker
from server.credentials import Caller

# What one caller may have at once. Others have as much, whatever it does.
MAX_REMOTE = 1024  # workers that get bytes
MAX_MAPPED = 256  # processes at the handover socket; each takes a descriptor for its life
MAX_CALLER_LEASES = 16384
MAX_LOADING = 1 << 20  # blocks that its open Loads name: a prompt of 64 million tokens
MAX_LEASES = 4096  # of one worker; an engine has one a request


@dataclass(frozen=True, slots=True)
class Worker:
    """Which worker a call names: by a token, among the workers of whoever calls."""

    caller: Caller
    token: bytes
    mapped: bool  # whether the token is from the handover socket


@dataclass(slots=True, eq=False)
class _Local:
    """A process at the handover socket."""

    holder: Holder
    caller: Caller
    uid: int | None  # None once the process has ended


@dataclass(eq=False)
class _Remote:
    """A worker that sends and gets bytes.

    ``uploaded`` are reserved blocks (lease, hash) whose bytes came whole and verified:
    only these may be committed.
    """

    holder: Holder
    seen: float  # monotonic seconds
    streams: int = 0
    uploaded: set[tuple[int, bytes]] = field(default_factory=set)


@dataclass(eq=False)
class _Share:
    """What one caller has."""

    local: dict[bytes, _Local] = field(default_factory=dict)
    remote: dict[bytes, _Remote] = field(default_factory=dict)
    loading: int = 0  # blocks that its open Loads name

    @property
    def empty(self) -> bool:
        return not (self.local or self.remote or self.loading)

    def leases(self) -> int:
        """How many leases its workers hold."""
        holders = [each.holder for each in self.local.values()]
        holders += [each.holder for each in self.remote.values()]
        return sum(len(holder.leases) for holder in holders)


class WorkerTable:
    """Tokens to holders, within what each caller may have."""

    def __init__(self, store: Store, *, idle_seconds: float) -> None:
        self._store = store
        self._idle_seconds = idle_seconds
        self._local: dict[bytes, _Local] = {}  # of all callers
        self._shares: dict[Caller, _Share] = {}

    def _share(self, caller: Caller) -> _Share:
        return self._shares.setdefault(caller, _Share())

    def admit(self, caller: Caller, uid: int) -> Holder:
        """A process at the handover socket: a mapped worker, if its caller may map.

        Raises ``LimitReached`` when the caller has too many.
        """
        share = self._share(caller)
        if len(share.local) >= MAX_MAPPED:
            raise LimitReached(f"{MAX_MAPPED} processes of this caller are connected already; end some")
        holder = self._store.connect(secrets.token_bytes(TOKEN_BYTES), mapped=caller.maps)
        self._local[holder.token] = share.local[holder.token] = _Local(holder, caller, uid)
        return holder

    def disown(self, holder: Holder) -> None:
        """The process that got this token has ended: it proves nobody's uid any more."""
        self._local[holder.token].uid = None

    def dismiss(self, holder: Holder) -> None:
        """A process at the handover socket has died: everything it held is free."""
        caller = self._local.pop(holder.token).caller
        del self._shares[caller].local[holder.token]
        self._retire(caller)
        self._store.disconnect(holder)

    def _retire(self, caller: Caller) -> None:
        """Forget a caller who has nothing."""
        if self._shares[caller].empty:
            del self._shares[caller]

    def is_gone(self, holder: Holder) -> bool:
        """Whether it is a mapped worker that was dismissed."""
        return holder.mapped and holder.token not in self._local

    def uid_of(self, token: str) -> int | None:
        """The uid of the process that got this token (in hex) at the handover socket, while that lives."""
        try:
            local = self._local.get(bytes.fromhex(token))
        except ValueError:
            return None
        return None if local is None else local.uid

    def holder(self, worker: Worker) -> Holder:
        """The worker's holder. Raises ``StaleWorker``, and ``LimitReached`` when its caller has too many."""
        if not worker.mapped:
            return self._remote_of(worker).holder
        local = self._local.get(worker.token)
        if local is None or not local.holder.mapped or local.caller != worker.caller:
            raise StaleWorker(
                f"worker {worker.token[:4].hex()} has no handover connection here; open it again"
            )
        return local.holder

    def _remote_of(self, worker: Worker) -> _Remote:
        share = self._share(worker.caller)
        remote = share.remote.get(worker.token)
        if remote is None:
            if len(share.remote) >= MAX_REMOTE:
                self._forget(share, lambda known: not known.holder.leases)  # they lose nothing
            if len(share.remote) >= MAX_REMOTE:
                raise LimitReached(
                    f"{MAX_REMOTE} workers of this caller hold leases already; release some, or wait until"
                    " they have expired"
                )
            remote = _Remote(self._store.connect(worker.token, mapped=False), 0.0)
            share.remote[worker.token] = remote
        remote.seen = time.monotonic()
        return remote

    def lessee(self, worker: Worker) -> Holder:
        """The worker's holder, with room for one more lease. Raises as ``holder``."""
        holder = self.holder(worker)
        if len(holder.leases) >= MAX_LEASES:
            raise LimitReached(f"this worker holds {MAX_LEASES} leases already; release some")
        if self._share(worker.caller).leases() >= MAX_CALLER_LEASES:
            raise LimitReached(
                f"the workers of this caller hold {MAX_CALLER_LEASES} leases already; release some"
            )
        return holder

    @contextmanager
    def streaming(self, worker: Worker) -> Iterator[Holder]:
        """The worker's holder, kept while a stream is open however long that is silent."""
        if worker.mapped:
            yield self.holder(worker)
            return
        remote = self._remote_of(worker)
        remote.streams += 1
        try:
            yield remote.holder
        finally:
            remote.streams -= 1
            remote.seen = time.monotonic()

    @contextmanager
    def loading(self, worker: Worker, blocks: int) -> Iterator[Holder]:
        """``streaming``, for a Load that names so many blocks. Raises ``LimitReached``, too."""
        share = self._share(worker.caller)
        if share.loading + blocks > MAX_LOADING:
            raise LimitReached(
                f"open loads of this caller name {share.loading} blocks, and {blocks} more would be over"
                f" {MAX_LOADING}; wait for some to end"
            )
        share.loading += blocks
        try:
            with self.streaming(worker):
                yield self.lessee(worker)
        finally:
            share.loading -= blocks

    def note_upload(self, worker: Worker, lease: int, block: bytes, *, whole: bool) -> None:
        """Bytes of a reserved block came from a worker, wholly or in part."""
        uploaded = self._remote_of(worker).uploaded
        if whole:
            uploaded.add((lease, block))
        else:
            uploaded.discard((lease, block))

    def require_uploaded(self, worker: Worker, lease: int, hashes: Sequence[bytes]) -> None:
        """Raises ``NotReserved`` unless the blocks have bytes; a mapped worker answers for its own."""
        if worker.mapped:
            return
        uploaded = self._remote_of(worker).uploaded
        for block in hashes:
            if (lease, block) not in uploaded:
                raise NotReserved(
                    f"block {block[:6].hex()} was not uploaded under lease {lease}; upload it first"
                )

    def forget_uploads(self, worker: Worker, lease: int, hashes: Sequence[bytes] | None = None) -> None:
        """These blocks (all, if not named) of a lease were committed or given up."""
        remote = self._share(worker.caller).remote.get(worker.token)
        if remote is not None and not worker.mapped:
            gone = remote.uploaded if hashes is None else {(lease, block) for block in hashes}
            remote.uploaded -= {item for item in gone if item[0] == lease}

    def sweep(self, now: float) -> None:
        """Forget the workers that were silent too long, and uploads whose lease has ended."""
        for caller, share in list(self._shares.items()):
            for remote in share.remote.values():
                remote.uploaded = {item for item in remote.uploaded if item[0] in remote.holder.leases}
            self._forget(share, lambda known: now - known.seen > self._idle_seconds)
            self._retire(caller)

    def _forget(self, share: _Share, which: Callable[[_Remote], bool]) -> None:
        for token, remote in list(share.remote.items()):
            if not remote.streams and which(remote):
                del share.remote[token]
                self._store.disconnect(remote.holder)
