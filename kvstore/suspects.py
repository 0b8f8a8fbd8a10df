"""Finding payloads that are missing altogether, once one was found damaged."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from kvstore.host import HostTier
from kvstore.pipeline import Pipeline
from kvstore.prefix_index import NONE, PrefixIndex
from kvstore.spaces import SpaceTable

log = logging.getLogger(__name__)


class Suspects:
    """Block sizes under suspicion: with one payload its whole file may be gone. Better known at once
    than block by block.
    """

    def __init__(
        self,
        index: PrefixIndex,
        host: HostTier,
        spaces: SpaceTable,
        pipeline: Pipeline,
        counters: Counter[str],
        drop: Callable[[int], None],
    ) -> None:
        """``drop`` is called on rows whose payload is gone."""
        self._index = index
        self._host = host
        self._spaces = spaces
        self._pipeline = pipeline
        self._counters = counters
        self._drop = drop
        self._sizes: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def add(self, block_bytes: int) -> None:
        """A payload of this size was damaged."""
        self._sizes.add(block_bytes)

    async def look(self) -> None:
        """Drop the blocks whose payloads are not there. Raises ``DiskError``."""
        while self._sizes:
            size = self._sizes.pop()
            index = self._index
            rows = {
                index.place[row]: row for row in index if index.place[row] != NONE and self._is(row, size)
            }
            try:
                missing = await self._pipeline.missing(size, list(rows))
            except BaseException:
                self._sizes.add(size)
                raise
            # A row may mean another block by now; and what is being read says itself how that ends.
            lost = [rows[place] for place in missing if index.place[rows[place]] == place]
            lost = [row for row in lost if self._is(row, size) and not self._host.is_reading(row)]
            for row in lost:
                self._drop(row)
            if lost:
                self._counters["lost_payloads"] += len(lost)
                log.error("event=payloads_lost count=%d block_bytes=%d", len(lost), size)

    def _is(self, row: int, size: int) -> bool:
        return self._spaces.of(self._index.namespace[row]).block_bytes == size
