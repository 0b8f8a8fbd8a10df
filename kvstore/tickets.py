"""Tickets: what a commit still waits for until it is on disk.

Once settled a ticket is a bit: it is kept for whoever asks later, and so many are that nothing else
may be. Each tenant's are remembered beside the others': whoever commits most loses the oldest.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable

from kvstore.errors import TicketUnknown

REMEMBERED = 65536
_ID_BITS = 63  # a number that cannot be guessed, and says nothing of how many there are


class _Open:
    """A ticket that waits for some rows. The future is there once somebody asks."""

    __slots__ = ("done", "durable", "namespace", "rows", "waits_for")

    def __init__(self, rows: tuple[int, ...], namespace: int) -> None:
        self.rows = rows
        self.waits_for = len(rows)
        self.namespace = namespace
        self.durable = True
        self.done: asyncio.Future[bool] | None = None

    def settle(self) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(self.durable)

    async def wait(self) -> bool:
        if self.done is None:
            self.done = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self.done)


class _Shares:
    """Who has how many remembered tickets, and whose oldest goes when there are too many."""

    def __init__(self) -> None:
        self._tickets: dict[Hashable, deque[int]] = {}
        self._by_size: defaultdict[int, dict[Hashable, None]] = defaultdict(dict)
        self._most = 0

    def add(self, share: Hashable, number: int) -> None:
        mine = self._tickets.setdefault(share, deque())
        mine.append(number)
        self._move(share, len(mine) - 1, len(mine))
        self._most = max(self._most, len(mine))

    def oldest_of_the_largest(self) -> int:
        """Forgets it, too."""
        share = next(iter(self._by_size[self._most]))
        mine = self._tickets[share]
        number = mine.popleft()
        self._move(share, len(mine) + 1, len(mine))
        if not mine:
            del self._tickets[share]
        if not self._by_size.get(self._most):
            self._most -= 1
        return number

    def _move(self, share: Hashable, before: int, now: int) -> None:
        self._by_size[before].pop(share, None)
        if not self._by_size[before]:
            del self._by_size[before]
        if now:
            self._by_size[now][share] = None


class TicketDesk:
    """Gives out tickets and settles them row by row. Owned by the store's event loop."""

    def __init__(
        self, share: Callable[[int], Hashable] = lambda namespace: namespace, remembered: int = REMEMBERED
    ) -> None:
        """``share`` says whose a namespace's tickets are; the largest share gives way to others."""
        self._share = share
        self._remembered = remembered
        self._shares = _Shares()
        # Of a settled one its namespace, doubled, and whether it is durable.
        self._tickets: dict[int, _Open | int] = {}
        self._waiting: defaultdict[int, list[int]] = defaultdict(list)  # row -> numbers
        # One number for each namespace stands for all commits that had nothing to wait for.
        self._nothing: dict[int, int] = {}
        self._nothing_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def give(self, rows: Iterable[int], namespace: int) -> int:
        """A ticket that is durable once all ``rows``, of one namespace, are settled so."""
        ticket = _Open(tuple(dict.fromkeys(rows)), namespace)
        if not ticket.rows:
            return self._for_nothing(namespace)
        number = self._fresh()
        for row in ticket.rows:
            self._waiting[row].append(number)
        self._tickets[number] = ticket
        self._shares.add(self._share(namespace), number)
        while len(self._tickets) > self._remembered:
            self._forget(self._shares.oldest_of_the_largest())
        return number

    def _for_nothing(self, namespace: int) -> int:
        number = self._nothing.get(namespace)
        if number is None:
            number = self._nothing[namespace] = self._fresh()
            self._nothing_of[number] = namespace
        return number

    def _fresh(self) -> int:
        """A number of this run. One from before a restart is not taken for it, nor one that was made up."""
        while True:
            number = secrets.randbits(_ID_BITS)
            if number and number not in self._tickets and number not in self._nothing_of:
                return number

    def _forget(self, number: int) -> None:
        ticket = self._tickets.pop(number)
        if isinstance(ticket, int):
            return
        for row in ticket.rows:
            others = self._waiting.get(row)
            if others is not None and number in others:
                others.remove(number)
                if not others:
                    del self._waiting[row]
        ticket.durable = False  # whoever waits shall not wait for ever
        ticket.settle()

    def close_namespace(self, namespace: int) -> None:
        """A namespace is gone for good: nobody can ask for its empty commits."""
        number = self._nothing.pop(namespace, None)
        if number is not None:
            del self._nothing_of[number]

    def settle(self, row: int, *, durable: bool) -> None:
        """A row was written, or will not be."""
        for number in self._waiting.pop(row, ()):
            ticket = self._tickets[number]
            if isinstance(ticket, int):
                continue
            ticket.waits_for -= 1
            ticket.durable = ticket.durable and durable
            if not ticket.waits_for:
                self._tickets[number] = ticket.namespace * 2 + ticket.durable
                ticket.settle()

    def settle_all(self) -> None:
        """The store closes: whatever is unsettled is not durable."""
        for row in list(self._waiting):
            self.settle(row, durable=False)

    async def wait(self, number: int) -> bool:
        """Whether the ticket's commit is on disk, once that is known. Raises ``TicketUnknown``."""
        if number in self._nothing_of:
            return True
        ticket = self._known(number)
        return bool(ticket & 1) if isinstance(ticket, int) else await ticket.wait()

    def namespace(self, number: int) -> int:
        """Id of the namespace whose blocks the ticket is about. Raises ``TicketUnknown``."""
        if number in self._nothing_of:
            return self._nothing_of[number]
        ticket = self._known(number)
        return ticket >> 1 if isinstance(ticket, int) else ticket.namespace

    def _known(self, number: int) -> _Open | int:
        ticket = self._tickets.get(number)
        if ticket is None:
            raise unknown_ticket(number)
        return ticket


def unknown_ticket(number: int) -> TicketUnknown:
    """What is said of a ticket that is not known, or not to be seen by whoever asks."""
    return TicketUnknown(f"ticket {number} was not given out by this run of the store, or is too old")
