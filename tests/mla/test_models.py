"""Attached models answer like stock transformers, for every served class."""

import pytest
import torch
from transformers import DynamicCache

import mla
from mla import LatentCache, LatentPool
from mla.adapters.transformers import cache_argument
from tests.mla.zoo import MODELS, build, forward, loaded_prefix, relative, tokens

CLOSE = 1e-4
TOTAL = 700


@pytest.fixture(params=sorted(MODELS), scope="module")
def model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def stock(model):
    return forward(model, tokens(TOTAL))


@pytest.fixture
def pool(model):
    info = mla.attach(model)
    yield LatentPool(info.layout, 64)
    mla.detach(model)


@pytest.mark.parametrize("length", [1, 100, TOTAL])
def test_prefill_equals_stock(model, stock, pool, length):
    with LatentCache(pool) as cache:
        got = forward(model, tokens(TOTAL)[:, :length], cache)
    assert relative(got, stock[:, :length]) <= CLOSE


@pytest.mark.parametrize("length", [1, 100, TOTAL])
def test_without_a_latent_cache_attached_equals_stock(model, stock, pool, length):
    assert relative(forward(model, tokens(TOTAL)[:, :length]), stock[:, :length]) <= CLOSE
    got = forward(model, tokens(TOTAL)[:, :length], DynamicCache(config=model.config))
    assert relative(got, stock[:, :length]) <= CLOSE


@pytest.mark.parametrize("prefix", [64, 384])
def test_suffix_prefill_over_a_loaded_prefix_equals_stock(model, stock, pool, prefix):
    ids = tokens(TOTAL)
    with loaded_prefix(model, pool, ids, prefix) as cache:
        chunks = [forward(model, part, cache) for part in ids[:, prefix:].split(150, dim=1)]
        assert cache.tokens == TOTAL
    assert relative(torch.cat(chunks, dim=1), stock[:, prefix:]) <= CLOSE
    assert pool.available == pool.num_blocks


def test_decode_equals_stock(model, stock, pool):
    ids = tokens(TOTAL)
    with loaded_prefix(model, pool, ids, 640) as cache:
        forward(model, ids[:, 640:690], cache)
        steps = [forward(model, ids[:, i : i + 1], cache) for i in range(690, TOTAL)]
    assert relative(torch.cat(steps, dim=1), stock[:, 690:]) <= CLOSE


def test_beams_equal_stock_over_a_loaded_prefix_and_from_nothing(model):
    ids = tokens(140, seed=2)
    options = {"num_beams": 3, "max_new_tokens": 8, "return_dict_in_generate": True, "output_scores": True}
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "length_penalty": 0.0}
    want = model.generate(ids, **options)
    pool = LatentPool(mla.attach(model).layout, 32)
    try:
        fresh, prefix = LatentCache(pool), loaded_prefix(model, pool, ids, 128)
        prefix.batch_repeat_interleave(3)
        for cache in (fresh, prefix):
            with cache:
                got = model.generate(ids, **{cache_argument(model): cache}, **options)
            assert torch.equal(got.sequences, want.sequences)
            assert relative(got.sequences_scores, want.sequences_scores) <= CLOSE
    finally:
        mla.detach(model)
    assert pool.available == pool.num_blocks


def test_detach_restores_the_stock_model_exactly(model, stock):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    implementation = model.config._attn_implementation
    mla.attach(model)
    assert list(model.state_dict()) == list(before)
    mla.detach(model)
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(forward(model, tokens(TOTAL)), stock)
