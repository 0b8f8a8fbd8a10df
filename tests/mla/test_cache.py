"""Block tables: sharing, copy on write, cropping, and what is refused."""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kvstore.errors import InvalidArgument
from kvstore.layout import DType, LatentLayout
from mla import LatentCache, LatentPool, PoolFull

LAYOUT = LatentLayout(num_layers=2, latent_rank=3, rope_dim=1, dtype=DType.FP32, block_tokens=16)


def append(cache: LatentCache, rows: list[list[float]]) -> None:
    """Cache one number a token, told apart by layer."""
    values = torch.tensor(rows)[:, None, :, None]
    for layer in range(LAYOUT.num_layers):
        entry = values + 1000 * layer
        cache.update(entry.expand(-1, -1, -1, 3), entry, layer)


def content(cache: LatentCache, row: int, layer: int = 1) -> list[float]:
    blocks = cache.pool.data[layer, cache.block_table(row)].flatten(0, 1)[: cache.tokens]
    assert bool((blocks == blocks[:, :1]).all())
    return [] if not len(blocks) else (blocks[:, 0] - 1000 * layer).tolist()


def span(start: int, stop: int) -> list[float]:
    return [float(i) for i in range(start, stop)]


@pytest.fixture
def pool():
    return LatentPool(LAYOUT, 16)


def test_update_returns_the_pool_layer_and_a_table_that_ends_in_the_length(pool):
    cache = LatentCache(pool)
    entry = torch.zeros(2, 1, 20, 3)
    layer, table = cache.update(entry, entry[..., :1], 1)
    assert layer.data_ptr() == pool.data[1].data_ptr()
    assert table.tolist() == [[*cache.block_table(row), 20] for row in range(2)]
    assert (cache.get_seq_length(0), cache.get_seq_length(1), cache.tokens) == (0, 20, 0)
    assert cache.get_mask_sizes(5, 1) == (25, 0)


def test_shared_blocks_are_copied_before_they_are_written(pool):
    with LatentCache(pool) as cache:
        append(cache, [span(0, 20)])
        twin = cache.fork()
        assert twin.block_table() == cache.block_table()
        append(twin, [span(100, 105)])
        append(cache, [span(20, 40)])
        assert content(twin, 0) == span(0, 20) + span(100, 105)
        assert content(cache, 0) == span(0, 40)
        assert twin.block_table()[0] == cache.block_table()[0]  # the full block stays shared
        twin.release()
    assert pool.available == 16


def test_a_registered_block_is_copied_when_cropping_makes_it_the_tail(pool):
    with LatentCache(pool) as cache:
        append(cache, [span(0, 32)])
        (_, block) = cache.block_table()
        pool.register(block, b"h" * 32)
        cache.crop(-6)
        append(cache, [span(50, 52)])
        assert cache.block_table()[1] != block
        assert content(cache, 0) == span(0, 26) + span(50, 52)
    assert pool.data[0, block, :, 0].tolist() == span(16, 32)
    assert pool.acquire(b"h" * 32) == block


def test_crop_takes_a_number_to_drop_or_a_length_to_keep_and_frees_blocks(pool):
    with LatentCache(pool) as cache:
        append(cache, [span(0, 50)])
        cache.crop(0)
        assert cache.tokens == 50
        cache.crop(-3)
        cache.crop(100)
        assert cache.tokens == 47
        cache.crop(16)
        assert (cache.tokens, len(cache.block_table()), pool.available) == (16, 1, 15)
        cache.crop(-99)
        assert (cache.tokens, cache.batch_size, pool.available) == (0, -1, 16)


def test_crop_evens_out_a_pass_that_failed_between_layers(pool):
    with LatentCache(pool) as cache:
        append(cache, [span(0, 10)])
        entry = torch.zeros(1, 1, 5, 1)
        cache.update(entry.expand(-1, -1, -1, 3), entry, 0)
        cache.crop(0)
        append(cache, [span(10, 12)])
        assert content(cache, 0, layer=0) == content(cache, 0, layer=1) == span(0, 12)


def test_a_full_pool_leaves_the_cache_as_it_was(pool):
    with LatentCache(pool) as cache, LatentCache(pool) as other:
        append(cache, [span(0, 20)])
        append(other, [span(0, 13 * 16)])
        with pytest.raises(PoolFull):
            append(cache, [span(20, 60)])
        assert (content(cache, 0), pool.available) == (span(0, 20), 1)
        append(cache, [span(20, 48)])
        assert content(cache, 0) == span(0, 48)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 20)),
            st.tuples(st.just("reorder"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
            st.tuples(st.just("crop"), st.integers(0, 20)),
            st.tuples(st.just("fork"), st.none()),
        ),
        max_size=12,
    )
)
def test_rows_behave_like_independent_lists(steps):
    pool = LatentPool(LAYOUT, 128)
    cache, twin, counter = LatentCache(pool), LatentCache(pool), 0
    append(cache, [[0.0], [0.0], [0.0]])
    rows, twin_rows = [[0.0], [0.0], [0.0]], []
    for what, value in steps:
        if what == "append":
            fresh = [span(counter + 100 * i, counter + 100 * i + value) for i in range(3)]
            counter += value
            append(cache, fresh)
            rows = [row + more for row, more in zip(rows, fresh, strict=True)]
        elif what == "reorder":
            cache.reorder_cache(torch.tensor(value))
            rows = [list(rows[i]) for i in value]
        elif what == "crop" and value < cache.tokens:
            cache.crop(-value)
            rows = [row[: len(row) - value] for row in rows]
        elif what == "fork":
            twin.release()
            twin, twin_rows = cache.fork(), [list(row) for row in rows]
        assert [content(cache, i) for i in range(3)] == rows
        assert [content(twin, i) for i in range(len(twin_rows))] == twin_rows
    cache.release()
    twin.release()
    assert pool.available == pool.num_blocks


def test_rows_are_repeated_selected_and_masked(pool):
    with LatentCache(pool) as cache:
        cache.batch_repeat_interleave(2)  # nothing to repeat yet
        append(cache, [span(0, 3), span(10, 13)])
        cache.batch_repeat_interleave(2)
        assert [content(cache, i)[0] for i in range(4)] == [0.0, 0.0, 10.0, 10.0]
        cache.batch_select_indices(torch.tensor([3, 0, 1]))
        assert [content(cache, i)[0] for i in range(3)] == [10.0, 0.0, 0.0]
        cache.batch_select_indices(torch.tensor([True, False, True]))
        assert [content(cache, i)[0] for i in range(cache.batch_size)] == [10.0, 0.0]


def test_a_deep_copy_shares_the_pool_and_holds_its_own_references(pool):
    with LatentCache(pool) as cache:
        append(cache, [span(0, 20)])
        with copy.deepcopy(cache) as twin:
            assert twin.pool is pool
            assert twin.block_table() == cache.block_table()
        assert content(cache, 0) == span(0, 20)
    assert pool.available == 16


def test_a_prefix_takes_over_the_references_and_release_may_be_called_twice(pool):
    blocks = pool.allocate(2)
    cache = LatentCache.from_prefix(pool, blocks, 32)
    assert (cache.tokens, cache.get_seq_length(), cache.batch_size) == (32, 32, 1)
    cache.release()
    cache.release()
    assert pool.available == 16


@pytest.mark.parametrize("tokens", [-1, 0, 16, 33])
def test_a_prefix_must_fill_its_blocks(pool, tokens):
    blocks = pool.allocate(2)
    with pytest.raises(InvalidArgument, match=f"{tokens} tokens do not fill 2 blocks of 16"):
        LatentCache.from_prefix(pool, blocks, tokens)


def test_a_prefix_of_blocks_that_nobody_holds_is_refused(pool):
    with pytest.raises(InvalidArgument, match="not referenced"):
        LatentCache.from_prefix(pool, [0], 16)


def test_an_empty_prefix_is_an_empty_cache(pool):
    assert LatentCache.from_prefix(pool, [], 0).batch_size == -1


def test_another_batch_width_dtype_or_layer_is_refused(pool):
    with LatentCache(pool) as cache:
        append(cache, [span(0, 3)])
        latent, rope = torch.zeros(1, 1, 1, 3), torch.zeros(1, 1, 1, 1)
        with pytest.raises(InvalidArgument, match="batch_repeat_interleave"):
            cache.update(latent.expand(3, -1, -1, -1), rope.expand(3, -1, -1, -1), 0)
        with pytest.raises(InvalidArgument, match="make it with the model's layout"):
            cache.update(latent.bfloat16(), rope.bfloat16(), 0)
        with pytest.raises(InvalidArgument, match="make it with the model's layout"):
            cache.update(rope, rope, 0)
        with pytest.raises(InvalidArgument, match="layer 2 is outside"):
            cache.update(latent, rope, 2)
        assert content(cache, 0) == span(0, 3)
