"""``LatentCache``: a transformers cache whose entries lie in blocks of a ``LatentPool``."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvstore.errors import InvalidArgument
from mla.pool import LatentPool, layer_slots


class LatentCache(Cache):
    """Block tables of a batch of equally long sequences.

    ``update`` returns the layer's pool tensor and the block table in place of keys and
    values, which the attention function of ``mla.attach`` takes. Full blocks may be shared
    with other caches; a shared tail block is copied before it is written.

    Not thread-safe. Call ``release`` (or use ``with``) to give the blocks back.

    Invariants: ``_tables`` has one table a row, all equally long, and holds one pool
    reference for each entry; no layer is longer than the tables reach.
    """

    def __init__(self, pool: LatentPool) -> None:
        self.pool = pool
        layers = pool.layout.num_layers
        first = pool.layout.first_layer
        super().__init__(layers=[_LatentLayer(self, first + i) for i in range(layers)])
        self._lengths = [0] * layers
        self._tables: list[list[int]] = []
        self._step: _Step | None = None

    @classmethod
    def from_prefix(cls, pool: LatentPool, blocks: Sequence[int], tokens: int) -> LatentCache:
        """A cache of one row that starts with ``tokens`` tokens in filled pool blocks.

        Takes over the caller's reference to each block. Raises ``InvalidArgument``, and
        takes nothing, when the blocks don't hold exactly that many tokens.
        """
        size = pool.layout.block_tokens
        if tokens < 0 or -(-tokens // size) != len(blocks):
            raise InvalidArgument(f"{tokens} tokens do not fill {len(blocks)} blocks of {size}")
        for block in blocks:
            if pool.references(block) == 0:
                raise InvalidArgument(f"block {block} is not referenced: acquire or allocate it first")
        cache = cls(pool)
        if blocks:
            cache._tables = [list(blocks)]
            cache._lengths = [tokens] * len(cache._lengths)
        return cache

    @property
    def tokens(self) -> int:
        """Tokens that every layer of every row holds."""
        return min(self._lengths)

    @property
    def batch_size(self) -> int:
        """Rows, -1 while the cache is empty."""
        return len(self._tables) or -1

    def block_table(self, row: int = 0) -> list[int]:
        """Pool blocks of a row in order; the first ``tokens // block_tokens`` are full."""
        return list(self._tables[row]) if self._tables else []

    def release(self) -> None:
        """Give all references back; the cache is empty then. May be called twice."""
        tables, self._tables = self._tables, []
        self._truncate(0)
        for table in tables:
            self.pool.release(table)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def fork(self) -> LatentCache:
        """A second cache with the same content, sharing the blocks until one of them writes."""
        twin = LatentCache(self.pool)
        for table in self._tables:
            self.pool.retain(table)
        twin._tables = [list(table) for table in self._tables]
        twin._lengths = list(self._lengths)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> LatentCache:
        # A field by field copy would copy the pool, or give references back twice.
        return self.fork()

    # --- what transformers calls ---

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append latents ``[B, 1, S, R]`` and rope keys ``[B, 1, S, dr]`` of one layer.

        Returns the layer's pool tensor ``[num_blocks, block, R + dr]`` and, on the CPU, the
        block table ``[B, n + 1]`` (int32) whose last column is the length in tokens. Raises
        ``PoolFull`` (nothing is changed) and ``InvalidArgument`` for a wrong shape or dtype.
        """
        index = layer_idx - self.pool.layout.first_layer
        batch, _, count, _ = key_states.shape
        self._check(key_states, value_states, index)
        step = self._prepare(batch, self._lengths[index], count)
        layer = self.pool.data[index]
        rank = self.pool.layout.latent_rank
        with torch.no_grad():
            slots = layer_slots(layer)
            slots[:, :rank].index_copy_(0, step.slots, key_states.detach().reshape(batch * count, -1))
            slots[:, rank:].index_copy_(0, step.slots, value_states.detach().reshape(batch * count, -1))
        self._lengths[index] = step.stop
        return layer, step.table

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of a layer."""
        return self._lengths[self._index(layer_idx)]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: bounded by the pool only."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that the next ``query_length`` tokens see, and the position of the first."""
        return self._lengths[self._index(layer_idx)] + query_length, 0

    def reset(self) -> None:
        """Same as ``release``."""
        self.release()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop tokens from the end: a negative number that many, a positive one all past it.

        (Older transformers mean by a positive number the length to keep.)
        """
        keep = tokens_to_remove if tokens_to_remove > 0 else self.tokens + tokens_to_remove
        self._truncate(max(keep, 0))
        blocks = -(-max(self._lengths) // self.pool.layout.block_tokens)
        for table in self._tables:
            self.pool.release(table[blocks:])
            del table[blocks:]
        if not blocks:
            self._tables = []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, copies side by side."""
        self._select([row for row in range(len(self._tables)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows (numbers, or a mask over the rows)."""
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select(rows.tolist())

    # --- tables ---

    def _index(self, layer_idx: int) -> int:
        # Transformers asks layer 0 for the length of the cache, whatever layers it has.
        return max(layer_idx - self.pool.layout.first_layer, 0)

    def _select(self, rows: Sequence[int]) -> None:
        if not self._tables or list(rows) == list(range(len(self._tables))):
            return
        chosen = [list(self._tables[row]) for row in rows]
        for table in chosen:
            self.pool.retain(table)
        for table in self._tables:
            self.pool.release(table)
        self._tables, self._step = chosen, None

    def _truncate(self, tokens: int) -> None:
        self._lengths = [min(length, tokens) for length in self._lengths]
        self._step = None

    def _prepare(self, batch: int, start: int, count: int) -> _Step:
        # The layers of one forward pass share a step: same rows, same positions.
        if self._step is None or (self._step.start, self._step.stop) != (start, start + count):
            self._grow(batch, start, start + count)
            self._step = _Step.of(self._tables, start, start + count, self.pool)
        return self._step

    def _grow(self, batch: int, start: int, stop: int) -> None:
        size = self.pool.layout.block_tokens
        tables = self._tables or [[] for _ in range(batch)]
        missing = max(-(-stop // size) - len(tables[0]), 0)
        written = range(start // size, len(tables[0]))
        shared = [(t, i) for t in tables for i in written if not self.pool.is_private(t[i])]
        fresh = self.pool.allocate(missing * batch + len(shared))
        self._own(shared, [fresh.pop() for _ in shared])
        for row, table in enumerate(tables):
            table.extend(fresh[row * missing : (row + 1) * missing])
        self._tables = tables

    def _own(self, shared: list[tuple[list[int], int]], copies: list[int]) -> None:
        # Copy on write of the given places in tables.
        if not shared:
            return
        originals = [table[place] for table, place in shared]
        self.pool.copy_blocks(originals, copies)
        for (table, place), copy in zip(shared, copies, strict=True):
            table[place] = copy
        self.pool.release(originals)

    def _check(self, latent: Tensor, rope: Tensor, index: int) -> None:
        layout, data = self.pool.layout, self.pool.data
        if not 0 <= index < layout.num_layers:
            raise InvalidArgument(f"layer {index + layout.first_layer} is outside the pool's layout {layout}")
        widths = (latent.shape[-1], rope.shape[-1])
        if widths != (layout.latent_rank, layout.rope_dim) or latent.dtype != data.dtype:
            raise InvalidArgument(
                f"the model caches {widths} numbers of {latent.dtype}, the pool"
                f" {(layout.latent_rank, layout.rope_dim)} of {data.dtype}; make it with the model's layout"
            )
        if self._tables and len(self._tables) != latent.shape[0]:
            raise InvalidArgument(
                f"a batch of {latent.shape[0]} for a cache of {len(self._tables)} rows; for beams or several"
                " answers call cache.batch_repeat_interleave first"
            )


class _Step:
    """Where the tokens ``[start, stop)`` of all rows go, and the table that reaches them."""

    def __init__(self, start: int, stop: int, slots: Tensor, table: Tensor) -> None:
        self.start, self.stop, self.slots, self.table = start, stop, slots, table

    @classmethod
    def of(cls, tables: list[list[int]], start: int, stop: int, pool: LatentPool) -> _Step:
        size = pool.layout.block_tokens
        table = torch.tensor([[*row, stop] for row in tables], dtype=torch.int32)
        positions = torch.arange(start, stop)
        slots = table[:, positions // size].long() * size + positions % size
        return cls(start, stop, slots.flatten().to(pool.data.device), table)


class _LatentLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """What transformers expects to find in ``Cache.layers``: a view of one layer of a cache."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: LatentCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # the pool has been allocated

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._cache.update(key_states, value_states, self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length, self._index)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length(self._index)

    def get_max_length(self) -> int:
        return self._cache.get_max_length(self._index)
