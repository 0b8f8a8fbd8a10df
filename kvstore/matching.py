"""Match: how much of a prompt can be loaded, why not more, and where to leave units.

Pure functions over the index and the ghost list. A common prefix shows when a chain
runs along known blocks and leaves them where other chains go on (request 1 is A+B,
request 2 is A+C): ``floor64(|A|)`` is where request 3, A+D, should hit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.api import Match, MissReason
from kvstore.errors import InvalidArgument
from kvstore.ghosts import GhostList, Setback
from kvstore.observer import Departure
from kvstore.prefix_index import NONE, BlockState, PrefixIndex, Walk
from kvstore.settings import Policy
from kvstore.units import plan_input

REASON_OF: Mapping[Departure | Setback, MissReason] = {
    Departure.CAPACITY: MissReason.EVICTED,
    Departure.EXPIRED: MissReason.EXPIRED,
    Departure.DELETED: MissReason.DELETED,
    Departure.CORRUPT: MissReason.LOST,
    Departure.LOST: MissReason.LOST,
    Setback.REFUSED: MissReason.REFUSED,
    Setback.GIVEN_UP: MissReason.FAILED,
    Setback.UNWRITTEN: MissReason.FAILED,
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the daemon sees it: hashes of its full blocks, and its length in tokens."""

    hashes: Sequence[bytes]
    tokens: int
    block_tokens: int
    align: int  # tokens; hits are rounded down to a multiple

    @property
    def usable_blocks(self) -> int:
        """The most blocks a hit may have: some token is always computed."""
        tokens = min(len(self.hashes) * self.block_tokens, max(self.tokens - 1, 0))
        return self.aligned(tokens // self.block_tokens)

    def aligned(self, blocks: int) -> int:
        """``blocks`` rounded down to a multiple of ``align`` tokens."""
        return blocks * self.block_tokens // self.align * self.align // self.block_tokens


def checked_prompt(hashes: Sequence[bytes], tokens: int, block_tokens: int, align: int) -> Prompt:
    """What a caller says of a prompt, whose hashes are such. Raises ``InvalidArgument``."""
    if tokens < len(hashes) * block_tokens:
        raise InvalidArgument(f"tokens={tokens} is less than {len(hashes)} blocks of {block_tokens}")
    if align <= 0 or (align % block_tokens and block_tokens % align):
        raise InvalidArgument(f"align={align} is no positive multiple of {block_tokens} tokens")
    return Prompt(hashes, tokens, block_tokens, math.lcm(align, block_tokens))


class Matcher:
    """Matches prompts against an index under a policy."""

    def __init__(self, index: PrefixIndex, ghosts: GhostList, *, policy: Policy, interval: int) -> None:
        self._index = index
        self._ghosts = ghosts
        self._policy = policy
        self._interval = interval

    def match(self, prompt: Prompt, walk: Walk, common: int) -> Match:
        """The deepest usable unit of a walked prompt, whose ``common_prefix`` is known. Changes nothing."""
        index, rows = self._index, walk.rows
        unit = len(rows) if self._policy == "block" else index.deepest_unit(rows)
        blocks = min(prompt.aligned(unit), prompt.usable_blocks)
        host = index.in_arena(rows[:blocks])
        return Match(
            blocks=blocks,
            host_blocks=host,
            disk_blocks=blocks - host,
            unit=index.hashes[rows[unit - 1]] if unit else None,
            unit_blocks=unit,
            stored_blocks=len(rows),
            reason=self._reason(prompt, walk, unit),
            persist_points=plan_input(
                prompt.tokens,
                interval=self._interval,
                common=(common * prompt.block_tokens,),
                block_tokens=prompt.block_tokens,
            ),
            interval=self._interval,
        )

    def common_prefix(self, prompt: Prompt, walk: Walk) -> int:
        """Depth in blocks at which the prompt parts from chains that go on.

        0 if it does not, or if a unit ends there already.
        """
        index, hashes = self._index, prompt.hashes
        known = len(walk.rows)
        while known < len(hashes) and hashes[known] in self._ghosts:
            known += 1
        if known == 0 or known == len(hashes):
            return 0
        if known == len(walk.rows):
            # Behind the last stored block: does a stored or remembered chain go on there?
            row = walk.last
            if index.kinds[row]:
                return 0
            ours = walk.next_row != NONE and index.parent[walk.next_row] == row
            elsewhere = index.children[row] > ours
            return known if elsewhere or self._ghosts.continued(index.hashes[row]) else 0
        return known if self._ghosts.continued(hashes[known - 1]) else 0

    def _reason(self, prompt: Prompt, walk: Walk, unit: int) -> MissReason:
        if not prompt.hashes:
            return MissReason.SHORTER_THAN_BLOCK
        if unit >= prompt.usable_blocks:
            return MissReason.NONE
        stored = len(walk.rows)
        if stored > unit:
            return MissReason.NO_UNIT
        if walk.next_row != NONE and self._index.state[walk.next_row] == BlockState.FILLING:
            return MissReason.PENDING
        gone = self._ghosts.gone(prompt.hashes[stored])
        if gone is not None:
            return REASON_OF[gone.why]
        if walk.next_row != NONE or prompt.hashes[stored] in self._ghosts:
            return MissReason.NOT_STORED
        if stored and self._index.children[walk.last]:
            return MissReason.DIVERGED
        return MissReason.NEVER_SEEN
