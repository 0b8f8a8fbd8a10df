"""Attaching to transformers: padding, generate, and what is refused by name."""

import copy

import pytest
import torch
import transformers
from transformers import DynamicCache

import mla
from kvstore.errors import InvalidArgument, NotMLA
from mla import LatentCache, LatentPool, Unsupported
from mla.adapters.transformers import cache_argument
from tests.mla.zoo import GROUPS, LONGROPE, MLA, MOE, build, forward, loaded_prefix, relative, tokens


@pytest.fixture(scope="module")
def model():
    model = build("deepseek_v3")
    mla.attach(model)
    return model


@pytest.fixture
def pool(model):
    return LatentPool(mla.attach(model).layout, 64)


def test_generate_continues_over_a_loaded_prefix_in_one_forward_of_the_rest(model, pool):
    ids = tokens(300)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    options |= {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True, "pad_token_id": 0}
    want = model.generate(ids, **options)
    forwarded = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: forwarded.append(out.shape[1])
    )
    with loaded_prefix(model, pool, ids, 128) as cache:
        forwarded.clear()
        got = model.generate(ids, **{cache_argument(model): cache}, **options)
        assert cache.tokens == 305  # the last sampled token has no latent yet
    hook.remove()
    assert forwarded == [172, 1, 1, 1, 1, 1]
    assert torch.equal(got.sequences, want.sequences)
    assert relative(torch.stack(got.logits), torch.stack(want.logits)) < 1e-4


def test_assisted_generation_crops_the_cache(model, pool):
    ids = tokens(80, seed=4)
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
        "pad_token_id": 0,
    }
    want = model.generate(ids, **options)
    with LatentCache(pool) as cache:
        got = model.generate(ids, **{cache_argument(model): cache}, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(got, want)


def test_left_padded_rows_equal_the_rows_alone(model, pool):
    ids, mask = tokens(100, rows=2), torch.ones(2, 100, dtype=torch.long)
    mask[0, :37] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    with LatentCache(pool) as cache:
        both = model.generate(ids, attention_mask=mask, **{cache_argument(model): cache}, **options)
    for row, start in ((0, 37), (1, 0)):
        alone = model.generate(
            ids[row : row + 1, start:], attention_mask=mask[row : row + 1, start:], **options
        )
        assert torch.equal(both.sequences[row, start:], alone.sequences[0])
        got, want = (torch.stack(out.logits)[:, i] for out, i in ((both, row), (alone, 0)))
        assert relative(got, want) < 1e-4


def test_a_mask_that_forgets_the_cached_tokens_is_refused(model, pool):
    with LatentCache(pool) as cache:
        forward(model, tokens(64), cache)
        mask = torch.ones(1, 10, dtype=torch.long)
        mask[0, 0] = 0
        with pytest.raises(InvalidArgument, match="padding mask for 10 of 74 tokens"):
            forward(model, tokens(10), cache, attention_mask=mask)


def test_packed_sequences_are_refused(model):
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    with pytest.raises(Unsupported, match="not plainly causal"):
        forward(model, tokens(12), position_ids=positions, use_cache=False)


def test_a_ready_made_mask_of_four_dimensions_is_refused(model):
    mask = torch.zeros(1, 1, 12, 12)
    with pytest.raises(Unsupported, match=r"shape \(1, 1, 12, 12\)"):
        forward(model, tokens(12), attention_mask=mask)


def test_training_is_refused():
    model = build("deepseek_v3")
    mla.attach(model)
    model.train()
    with pytest.raises(Unsupported, match=r"call model.eval\(\)"):
        forward(model, tokens(12))


def test_a_copy_of_an_attached_model_is_refused_until_it_is_attached(model):
    twin = copy.deepcopy(model)
    with pytest.raises(Unsupported, match="is not attached"):
        forward(twin, tokens(12))


def test_attaching_twice_is_once_and_detaching_twice_is_refused():
    model = build("deepseek_v2")
    stock = forward(model, tokens(20))
    assert mla.attach(model) == mla.attach(model)
    mla.detach(model)
    assert torch.equal(forward(model, tokens(20)), stock)
    with pytest.raises(InvalidArgument, match="not attached"):
        mla.detach(model)


def test_what_a_model_caches_is_told():
    info = mla.inspect_model(build("longcat_flash").bfloat16())
    layout = info.layout
    assert (layout.num_layers, layout.latent_rank, layout.rope_dim, layout.dtype) == (2, 64, 16, "bf16")
    assert info.rope_layout == "halves"
    assert mla.inspect_model(build("deepseek_v2")).rope_layout == "interleaved"
    assert info.max_tokens is None


def test_longrope_is_refused_past_its_original_length():
    model = build("minicpm3", rope_parameters={**LONGROPE, "original_max_position_embeddings": 100})
    info = mla.attach(model)
    assert info.max_tokens == 100
    with LatentCache(LatentPool(info.layout, 4)) as cache:
        forward(model, tokens(100), cache)
        with pytest.raises(Unsupported, match="101 tokens with longrope of original length 100"):
            forward(model, tokens(1), cache)


def refused(name, **config):
    model_class = getattr(transformers, f"{name}ForCausalLM", None)
    if model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}ForCausalLM")
    with torch.device("meta"):
        model = model_class(getattr(transformers, f"{name}Config")(**config))
    implementation = model.config._attn_implementation
    with pytest.raises(Unsupported) as caught:
        mla.attach(model)
    assert model.config._attn_implementation == implementation
    return str(caught.value)


SMALL = {"num_hidden_layers": 2, "vocab_size": 128}


def test_dynamic_rope_is_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "dynamic" in refused("DeepseekV3", **MLA | MOE | GROUPS | {"rope_parameters": rope})


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa", "AXK2", "HYV4"])
def test_sparse_index_models_are_refused(name):
    assert "indexer" in refused(name, num_hidden_layers=2)


@pytest.mark.parametrize("name", ["KimiLinear", "BailingHybrid"])
def test_hybrids_with_linear_state_are_refused(name):
    assert "recurrent state" in refused(name, num_hidden_layers=8)


def test_sinks_are_refused():
    model = build("deepseek_v3")
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(Unsupported, match="attention sinks"):
        mla.attach(model)


def test_a_projection_with_a_bias_is_refused():
    model = build("deepseek_v3")
    model.model.layers[1].self_attn.kv_b_proj = torch.nn.Linear(64, 4 * 44)
    with pytest.raises(Unsupported, match="has a bias"):
        mla.attach(model)


def test_an_unknown_attention_class_is_refused_by_its_name():
    model = build("deepseek_v3")

    class HomemadeAttention(type(model.model.layers[0].self_attn)):
        pass

    model.model.layers[0].self_attn.__class__ = HomemadeAttention
    with pytest.raises(Unsupported, match="HomemadeAttention is not known"):
        mla.attach(model)


def test_a_dtype_without_a_pool_is_refused():
    with pytest.raises(Unsupported, match=r"torch.float64: cast it"):
        mla.attach(build("deepseek_v3").double())


def test_a_model_without_latents_is_no_mla_model():
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=32, num_attention_heads=2, **SMALL)
    with pytest.raises(NotMLA, match="LlamaForCausalLM"):
        mla.attach(transformers.LlamaForCausalLM(config))


def test_an_attached_model_works_with_transformers_own_cache(model):
    ids = tokens(90)
    cache = DynamicCache(config=model.config)
    parts = [forward(model, part, cache) for part in ids.split(40, dim=1)]
    assert relative(torch.cat(parts, dim=1), forward(model, ids)) < 1e-4
