"""A trace through the store's own index, matcher and evictor: all of the store but its bytes."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.eviction import TailEvictor
from kvstore.ghosts import GhostList
from kvstore.matching import Matcher, Prompt
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.settings import Policy
from kvstore.units import UnitKind, plan_input
from server.planning.trace import Trace

_SPACE = 1
_SLACK = 256  # eviction looks at all leaves, so it makes room for 1/256 of the capacity at a time


@dataclass(frozen=True, slots=True)
class Outcome:
    """Blocks that were asked for, that hit, and that had to be written."""

    asked: int
    hits: int
    written: int

    @property
    def hit_rate(self) -> float:
        """Share of the asked blocks that hit."""
        return self.hits / self.asked


class Replay:
    """One cache of ``capacity`` blocks under a policy; ``interval`` in blocks between unit marks."""

    def __init__(self, capacity: int, policy: Policy, interval: int) -> None:
        self._capacity = capacity
        self._interval = interval
        self._index = PrefixIndex()
        self._ghosts = GhostList(64 << 20)
        # Positions are counted in blocks: a block of one "token".
        self._matcher = Matcher(self._index, self._ghosts, policy=policy, interval=interval)
        self._evictor = TailEvictor(self._index, policy)
        self._names: dict[int, bytes] = {}
        self._used = self._asked = self._hits = self._written = 0

    def run(self, trace: Trace) -> Outcome:
        """Every request of a trace, each matched and then stored whole."""
        for now, request in enumerate(trace.requests):
            self._request(request.blocks, request.tokens // trace.block_tokens, float(now))
        return Outcome(self._asked, self._hits, self._written)

    def _request(self, blocks: tuple[int, ...], whole: int, now: float) -> None:
        hashes = [self._name(block) for block in blocks]
        walk = self._index.walk(_SPACE, hashes)
        # One more, so that the last block may hit: a trace names partial blocks too.
        prompt = Prompt(hashes, len(hashes) + 1, 1, 1)
        common = self._matcher.common_prefix(prompt, walk)
        self._asked += len(hashes)
        self._hits += self._matcher.match(prompt, walk, common).blocks
        if common == len(walk.rows) > 0:
            self._index.mark(walk.last, UnitKind.COMMON_PREFIX, now)
        self._ghosts.remember(hashes[max(len(walk.rows) - 1, 0) :])
        self._store(hashes, {common, whole}, now)
        self._make_room()

    def _name(self, block: int) -> bytes:
        name = self._names.get(block)
        if name is None:
            name = self._names[block] = block.to_bytes(32, "big", signed=True)
        return name

    def _store(self, hashes: list[bytes], ends: set[int], now: float) -> None:
        index, above, rows = self._index, NONE, []
        for depth, block in enumerate(hashes, 1):
            row = index.find(block)
            if row == NONE:
                row = index.add(block, above, _SPACE, depth, now)
            if index.state[row] != BlockState.PRESENT:
                index.adopt(row, above)
                index.state[row], index.place[row] = BlockState.PRESENT, 0
                self._ghosts.forget(block)
                self._used += 1
                self._written += 1
            index.used[row] = now
            rows.append(row)
            above = row
        # The last block may be partial: the unit at the input's end then lies before it, too.
        for point in plan_input(len(rows), interval=self._interval, common=ends, block_tokens=1):
            index.mark(rows[point.tokens - 1], point.kinds, now)
        for row in rows:
            if index.forks(row):
                index.mark(row, UnitKind.COMMON_PREFIX, now)

    def _make_room(self) -> None:
        if self._used <= self._capacity:
            return
        target = self._capacity - self._capacity // _SLACK

        def drop(row: int) -> None:
            self._used -= 1
            self._index.lose(row)

        self._evictor.evict(lambda: self._used <= target, drop)
