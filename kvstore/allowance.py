"""How many namespaces, and of how many sizes of blocks, somebody may have open at a time.

Each namespace counts for the whole store, for its tenant, and for the caller that opened it if the
store was told of one. So none of them takes what is there for all. A refusal names the limit and
whose it is, and tells nothing of others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.errors import NamespaceLimit
from kvstore.namespace import Namespace
from kvstore.settings import StoreSettings

MAX_NAMESPACES = 65536
MAX_BLOCK_SIZES = 64  # each has files, maps and slots of its own

Whose = tuple[str, str]  # "tenant" or "caller", and its name


@dataclass(eq=False, slots=True)
class Share:
    """What one of them has open. Without ``whose`` it is the whole store's."""

    whose: Whose | None
    namespaces: int
    sizes: int
    ids: OrderedDict[int, int] = field(default_factory=OrderedDict)  # id -> size; least recently used first
    by_size: dict[int, set[int]] = field(default_factory=dict)
    coming: dict[Namespace, int] = field(default_factory=dict)  # those that are being opened -> size

    @property
    def full(self) -> bool:
        """Whether no further namespace fits."""
        return len(self.ids) + len(self.coming) >= self.namespaces

    def crowded(self, size: int) -> bool:
        """Whether there are as many sizes of blocks as may be, and this is not one of them."""
        known = self.by_size.keys() | set(self.coming.values())
        return size not in known and len(known) >= self.sizes

    def require(self, size: int) -> None:
        """Raises ``NamespaceLimit`` unless one more namespace of this size fits."""
        if not self.full and not self.crowded(size):
            return
        limit = f"{self.namespaces} namespaces" if self.full else f"{self.sizes} sizes of blocks"
        if self.whose is None:
            raise NamespaceLimit(f"this store has room for {limit}, and no more; try again later")
        kind, name = self.whose
        setting = "tenant_namespaces" if self.full else "tenant_block_sizes"
        raise NamespaceLimit(
            f"{kind} {name[:80]!r} has {limit} in use, and may have no more; delete what is not needed, wait"
            f" until it expires, or raise {setting}"
        )


class Allowances:
    """The shares of a store. Owned by its event loop."""

    def __init__(self, namespaces: int, sizes: int) -> None:
        """So many for each tenant, and for each caller."""
        self._limits = namespaces, sizes
        self.all = Share(None, MAX_NAMESPACES, MAX_BLOCK_SIZES)
        self._shares: dict[Whose, Share] = {}
        self._of: dict[int, list[Share]] = {}  # by id of the namespace

    @classmethod
    def of(cls, settings: StoreSettings) -> Allowances:
        """As a store's settings say."""
        return cls(settings.tenant_namespaces, settings.tenant_block_sizes)

    def shares(self, tenant: str, opener: str | None) -> list[Share]:
        """Those that a namespace of this tenant counts for, the narrowest first. After an await ask anew."""
        whose: list[Whose] = [("tenant", tenant)]
        if opener is not None:
            whose.append(("caller", opener))
        return [*(self._shares.setdefault(each, Share(each, *self._limits)) for each in whose), self.all]

    def ids_of(self, tenant: str) -> set[int]:
        """The open namespaces of a tenant."""
        share = self._shares.get(("tenant", tenant))
        return set() if share is None else set(share.ids)

    def enter(self, number: int, size: int, shares: list[Share]) -> None:
        """A namespace is open from now on."""
        self._of[number] = shares
        for share in shares:
            share.ids[number] = size
            share.by_size.setdefault(size, set()).add(number)

    def leave(self, number: int) -> None:
        """It is open no longer."""
        shares = self._of.pop(number)
        for share in shares:
            size = share.ids.pop(number)
            share.by_size[size].discard(number)
            if not share.by_size[size]:
                del share.by_size[size]
        self.tidy(shares)

    def touch(self, number: int) -> None:
        """It was used."""
        for share in self._of[number]:
            share.ids.move_to_end(number)

    def tidy(self, shares: Iterable[Share]) -> None:
        """Forget the shares of those who have nothing."""
        for share in shares:
            if share.whose is not None and not share.ids and not share.coming:
                self._shares.pop(share.whose, None)
