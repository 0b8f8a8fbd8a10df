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

from kvstore.errors import NotReserved, Unavailable
from kvstore.leases import Holder
from kvstore.store import Store
from kvstore.wire import TOKEN_BYTES, StaleWorker
from server.credentials import Caller

MAX_REMOTE = 4096
MAX_MAPPED = 512  # each takes a descriptor for its life
MAX_LEASES = 4096  # of one worker; an engine has one a request


@dataclass(frozen=True, slots=True)
class Worker:
    """Which worker a call names: by a token, among the workers of whoever calls."""

    caller: Caller
    token: bytes
    mapped: bool  # whether the token is from the handover socket


@dataclass(frozen=True, slots=True, eq=False)
class _Local:
    """A process at the handover socket."""

    holder: Holder
    caller: Caller
    uid: int


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


class WorkerTable:
    """Tokens to holders."""

    def __init__(self, store: Store, *, idle_seconds: float) -> None:
        self._store = store
        self._idle_seconds = idle_seconds
        self._local: dict[bytes, _Local] = {}
        self._remote: dict[tuple[Caller, bytes], _Remote] = {}

    def admit(self, caller: Caller, uid: int) -> Holder:
        """A process at the handover socket: a mapped worker, if its caller may map.

        Raises ``Unavailable`` when there are too many.
        """
        if len(self._local) >= MAX_MAPPED:
            raise Unavailable(f"{MAX_MAPPED} workers map the arena already; try again later")
        holder = self._store.connect(secrets.token_bytes(TOKEN_BYTES), mapped=caller.maps)
        self._local[holder.token] = _Local(holder, caller, uid)
        return holder

    def dismiss(self, holder: Holder) -> None:
        """A process at the handover socket has died: everything it held is free."""
        del self._local[holder.token]
        self._store.disconnect(holder)

    def is_gone(self, holder: Holder) -> bool:
        """Whether it is a mapped worker that was dismissed."""
        return holder.mapped and holder.token not in self._local

    def uid_of(self, token: str) -> int | None:
        """The uid of the process that got this token (in hex) at the handover socket, while it lives."""
        try:
            local = self._local.get(bytes.fromhex(token))
        except ValueError:
            return None
        return None if local is None else local.uid

    def holder(self, worker: Worker) -> Holder:
        """The worker's holder. Raises ``StaleWorker``, and ``Unavailable`` when there are too many."""
        if not worker.mapped:
            return self._remote_of(worker).holder
        local = self._local.get(worker.token)
        if local is None or not local.holder.mapped or local.caller != worker.caller:
            raise StaleWorker(
                f"worker {worker.token[:4].hex()} has no handover connection here; open it again"
            )
        return local.holder

    def _remote_of(self, worker: Worker) -> _Remote:
        remote = self._remote.get((worker.caller, worker.token))
        if remote is None:
            if len(self._remote) >= MAX_REMOTE:
                self._forget(lambda known: not known.holder.leases)  # they lose nothing
            if len(self._remote) >= MAX_REMOTE:
                raise Unavailable(f"{MAX_REMOTE} workers are connected already; try again later")
            remote = _Remote(self._store.connect(worker.token, mapped=False), 0.0)
            self._remote[worker.caller, worker.token] = remote
        remote.seen = time.monotonic()
        return remote

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
        remote = self._remote.get((worker.caller, worker.token))
        if remote is not None and not worker.mapped:
            gone = remote.uploaded if hashes is None else {(lease, block) for block in hashes}
            remote.uploaded -= {item for item in gone if item[0] == lease}

    def sweep(self, now: float) -> None:
        """Forget the workers that were silent too long, and uploads whose lease has ended."""
        for remote in self._remote.values():
            remote.uploaded = {item for item in remote.uploaded if item[0] in remote.holder.leases}
        self._forget(lambda known: now - known.seen > self._idle_seconds)

    def _forget(self, which: Callable[[_Remote], bool]) -> None:
        for known, remote in list(self._remote.items()):
            if not remote.streams and which(remote):
                del self._remote[known]
                self._store.disconnect(remote.holder)


def require_lease_room(holder: Holder) -> None:
    """Raises ``Unavailable`` for a worker that opens leases without end."""
    if len(holder.leases) >= MAX_LEASES:
        raise Unavailable(f"this worker holds {MAX_LEASES} leases already; release some")
