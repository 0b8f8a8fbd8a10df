"""A client's way to its daemon: the channel, and the arena as it is mapped now."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvstore import wire
from kvstore.errors import ArenaUnavailable, DeadlineExceeded, Unavailable
from kvstore.mapping import Mapping, open_mapping
from kvstore.transport import Transport
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import WorkerId

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Seconds to tell a daemon that leases are over: of one that has just failed to answer, or of all at the end.
RELEASE_TIMEOUT = 1.0

# What the daemon did is not known: it may hold slots for us. One that refuses holds none.
_UNSURE = (DeadlineExceeded, wire.Unheard, wire.DaemonFailed, wire.NotUnderstood, wire.StaleWorker)


class Attachment:
    """The channel and the mapped arena. Maps when first needed, and anew after the daemon has restarted.

    Thread-safe.
    """

    def __init__(self, transport: Transport, remote: WorkerId, *, handover: str) -> None:
        """``remote`` is who we are without an arena; ``handover`` the daemon's socket, empty for none."""
        self.transport = transport
        self._remote = remote
        self._handover = handover
        self._lock = threading.Lock()  # over what follows
        self._mapping: Mapping | None = None
        self._ends_at: float | None = None  # monotonic seconds; once it is closing

    def identity(self, mapping: Mapping | None) -> WorkerId:
        """Who we are to the daemon, with or without its arena."""
        return self._remote if mapping is None else mapping.identity

    def with_arena(self, action: Callable[[Mapping | None], Result]) -> Result:
        """Run an action with the live arena, or None for bytes; again if the daemon has restarted."""
        self.transport.require_usable()
        try:
            return self._run(action)
        except wire.StaleWorker:
            return self._run(action)

    def _run(self, action: Callable[[Mapping | None], Result]) -> Result:
        mapping = self._take()
        try:
            return action(mapping)
        except _UNSURE:
            # Slots may be announced or reserved for us without our knowing.
            if mapping is not None:
                self.retire(mapping)
            raise
        finally:
            if mapping is not None:
                mapping.done()

    def _take(self) -> Mapping | None:
        """The live mapping, in use by the caller until ``done``; None if the arena can't be had."""
        if not self._handover:
            return None
        with self._lock:
            if self._mapping is not None and not self._mapping.alive():
                self._mapping.retire()
                self._mapping = None
            if self._mapping is None:
                timeout = self.transport.timeout
                self.transport.require_usable()  # it may have been closed meanwhile
                try:
                    with self.transport.noting_silence(time.monotonic() + timeout):
                        self._mapping = open_mapping(self._handover, timeout)
                except ArenaUnavailable as error:
                    log.info("event=arena_unavailable reason=%s", error)
                    return None
            self._mapping.use()
            return self._mapping

    def retire(self, mapping: Mapping) -> None:
        """Take another one from now on; this one's connection ends once nobody uses a slot of it."""
        with self._lock:
            if self._mapping is mapping:
                self._mapping = None
        mapping.retire()

    def free(self, lease: int, mapping: Mapping | None) -> None:
        """Tell the daemon that a lease is over; it learns by the connection's end otherwise."""
        request = pb.ReleaseRequest(lease=lease, worker=wire.worker(self.identity(mapping)))
        try:
            self.transport.call(self.transport.stub.Release, request, self._time_to_tell())
        except Unavailable as error:
            log.info("event=release_unheard reason=%s", error)
            if self._ends_at is not None:
                self._ends_at = 0.0  # one deadline for all of them
            if mapping is not None:
                self.retire(mapping)

    def _time_to_tell(self) -> float:
        """Raises ``Unavailable`` when the time for all of them is over."""
        if self._ends_at is None:
            return RELEASE_TIMEOUT
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise Unavailable("this client is closed, and its time to say so is over")
        return left

    def begin_end(self) -> None:
        """From now on all that is still to be freed has one deadline together."""
        self._ends_at = time.monotonic() + RELEASE_TIMEOUT

    def close(self) -> None:
        """End the channel, and the arena's connection as soon as nobody can look at a slot any more."""
        self.transport.close()
        with self._lock:
            mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.retire()
