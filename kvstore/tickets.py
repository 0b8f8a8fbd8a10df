"""Tickets: what a commit still waits for until it is on disk."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Iterable

from kvstore.errors import TicketUnknown

_REMEMBERED = 65536


class _Ticket:
    def __init__(self, rows: set[int], namespace: int) -> None:
        self.rows = rows
        self.namespace = namespace
        self.durable = True
        self.done = asyncio.get_running_loop().create_future()

    def settle(self, row: int, durable: bool) -> None:
        self.rows.discard(row)
        self.durable = self.durable and durable
        if not self.rows and not self.done.done():
            self.done.set_result(None)


class TicketDesk:
    """Gives out tickets and settles them row by row. Owned by the store's event loop."""

    def __init__(self) -> None:
        # A ticket from before a restart must not be taken for one of this run.
        self._last = secrets.randbits(38) << 24
        self._tickets: OrderedDict[int, _Ticket] = OrderedDict()
        self._waiting: defaultdict[int, list[_Ticket]] = defaultdict(list)

    def give(self, rows: Iterable[int], namespace: int) -> int:
        """A ticket that is durable once all ``rows``, of one namespace, are settled so."""
        ticket = _Ticket(set(rows), namespace)
        if not ticket.rows:
            ticket.done.set_result(None)
        for row in ticket.rows:
            self._waiting[row].append(ticket)
        self._last += 1
        self._tickets[self._last] = ticket
        while len(self._tickets) > _REMEMBERED:
            self._tickets.popitem(last=False)
        return self._last

    def settle(self, row: int, *, durable: bool) -> None:
        """A row was written, or will not be."""
        for ticket in self._waiting.pop(row, ()):
            ticket.settle(row, durable)

    def settle_all(self) -> None:
        """The store closes: whatever is unsettled is not durable."""
        for row in list(self._waiting):
            self.settle(row, durable=False)

    async def wait(self, number: int) -> bool:
        """Whether the ticket's commit is on disk, once that is known. Raises ``TicketUnknown``."""
        ticket = self._known(number)
        await asyncio.shield(ticket.done)
        return ticket.durable

    def namespace(self, number: int) -> int:
        """Id of the namespace whose blocks the ticket is about. Raises ``TicketUnknown``."""
        return self._known(number).namespace

    def _known(self, number: int) -> _Ticket:
        ticket = self._tickets.get(number)
        if ticket is None:
            raise unknown_ticket(number)
        return ticket


def unknown_ticket(number: int) -> TicketUnknown:
    """What is said of a ticket that is not known, or not to be seen by whoever asks."""
    return TicketUnknown(f"ticket {number} was not given out by this run of the store, or is too old")
