"""Memory that is lent to a caller for a while, and whether he can still look at it afterwards.

A view is released when its time is over, so that a late use of it is an error. But an array over
it, or a part of it, keeps the memory in sight and cannot be ended from here. So each view has an object
of its own below it that lives exactly as long as somebody can look; until then the slot is not given to
another block.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvstore.ending import end_when_dropped
from kvstore.errors import StillWritten


class Lent:
    """One piece of memory with a caller. ``view`` is what he gets."""

    __slots__ = ("_below", "ended", "view")

    def __init__(self, memory: memoryview, *, readonly: bool = False) -> None:
        array: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        if readonly:
            array.flags.writeable = False
        self.view = array.data
        self.ended = False
        self._below = weakref.ref(array)

    def end(self) -> bool:
        """End the view. Whether nobody can look at the memory any more."""
        self.ended = True
        try:  # not ``suppress``, which would cost as much as the rest: this is for each block
            self.view.release()
        except BufferError:  # an array over it is still alive
            return False
        return not self.seen

    @property
    def seen(self) -> bool:
        """Whether somebody can look at the memory."""
        return self._below() is not None

    def below(self) -> object | None:
        """What lives as long as somebody can look; None if nobody can."""
        return self._below()


def when_unseen(lent: Sequence[Lent], then: Callable[[], None]) -> None:
    """Call ``then`` once nobody can look at any of it: now if so, else in a thread of its own."""
    for one in lent:
        below = one.below()
        if below is not None:
            end_when_dropped(below, partial(when_unseen, lent, then))
            return
    then()


def memory_under(view: memoryview) -> object:
    """What a view was made of, below the object that ``Lent`` puts in between."""
    below = view.obj
    if isinstance(below, np.ndarray) and isinstance(below.base, memoryview):
        return below.base.obj
    return below


class Fills:
    """The blocks of one lease that its owner writes, by their hashes."""

    def __init__(self) -> None:
        self._lent: defaultdict[bytes, list[Lent]] = defaultdict(list)

    def lend(self, block: bytes, memory: memoryview) -> memoryview:
        """The view of a block to be written: the one that is out already, if its time is not over."""
        lent = self._lent[block]
        if not lent or lent[-1].ended:
            lent.append(Lent(memory))
        return lent[-1].view

    def seal(self, hashes: Iterable[bytes]) -> None:
        """End the views of blocks that are to be committed: what is stored must not change any more.

        Raises ``StillWritten`` if one can still be written; a reservation by the same lease gives new views.
        """
        for block in hashes:
            if [one for one in self._lent.get(block, ()) if not one.end()]:
                raise StillWritten(
                    f"block {block[:6].hex()} can still be written through an array over its view, or a part"
                    " of it: drop these, and commit again"
                )

    def forget(self, hashes: Iterable[bytes]) -> None:
        """These blocks were committed."""
        for block in hashes:
            self._lent.pop(block, None)

    def end(self) -> list[Lent]:
        """End all views. Those through which somebody can still write."""
        every = [one for lent in list(self._lent.values()) for one in lent]
        self._lent.clear()
        return [one for one in every if not one.end()]
