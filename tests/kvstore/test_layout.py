import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument, NotMLA
from kvstore.layout import PRESETS, DType, LatentLayout, Strip, preset

LAYOUTS = st.builds(
    LatentLayout,
    num_layers=st.integers(1, 80),
    latent_rank=st.sampled_from([128, 256, 512]),
    rope_dim=st.sampled_from([0, 16, 64]),
    dtype=st.sampled_from(DType),
    first_layer=st.integers(0, 60),
    strips=st.lists(
        st.builds(Strip, st.sampled_from(["indexer", "scale"]), st.integers(1, 200)), max_size=2
    ).map(tuple),
    block_tokens=st.sampled_from([16, 64, 128]),
)


@pytest.mark.parametrize(
    ("name", "changes", "block_bytes", "entry_bytes"),
    [
        ("deepseek-v3", {}, 4_497_408, 1152),
        ("deepseek-v2-lite", {}, 1_990_656, 1152),
        ("kimi-k2", {}, 4_497_408, 1152),
        ("deepseek-v3", {"dtype": DType.FP8}, 61 * 64 * 576, 576),
        ("deepseek-v3", {"dtype": DType.FP8_DS_MLA}, 61 * 64 * 656, 656),
        ("deepseek-v3", {"dtype": DType.FP32}, 8_994_816, 2304),
    ],
)
def test_the_published_sizes(name, changes, block_bytes, entry_bytes):
    layout = preset(name, **changes)
    assert (layout.block_bytes, layout.entry_bytes) == (block_bytes, entry_bytes)


@given(LAYOUTS)
def test_the_byte_counts_agree(layout):
    strips = sum(strip.nbytes for strip in layout.strips)
    assert layout.entries_bytes == layout.num_layers * layout.block_tokens * layout.entry_bytes
    assert layout.block_bytes == layout.entries_bytes + layout.num_layers * layout.block_tokens * strips
    assert layout.block_bytes == layout.token_bytes * layout.block_tokens


@given(LAYOUTS)
def test_a_layout_survives_json(layout):
    assert LatentLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


@given(LAYOUTS, st.integers(0, 10_000))
def test_tokens_round_down_to_blocks(layout, tokens):
    assert layout.floor(tokens) == layout.blocks(tokens) * layout.block_tokens <= tokens
    assert tokens - layout.floor(tokens) < layout.block_tokens


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_layers": 2**20}, "num_layers=1048576"),
        ({"num_layers": True}, "num_layers=True"),
        ({"num_layers": 1, "latent_rank": "512"}, "latent_rank='512'"),
        ({"num_layers": 1, "rope_dim": -1}, "rope_dim=-1"),
        ({"num_layers": 1, "block_tokens": 40}, "block_tokens=40"),
        ({"num_layers": 1, "latent_rank": 100, "dtype": DType.FP8_DS_MLA}, "got 100"),
    ],
)
def test_impossible_layouts_are_refused_with_the_value(fields, said):
    with pytest.raises(InvalidArgument, match=said):
        LatentLayout(**fields)


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"num_layers": 2, "colour": 1},
        {"num_layers": 2, "dtype": "int4"},
        {"num_layers": 2, "strips": [{}]},
    ],
)
def test_malformed_dicts_are_refused(raw):
    with pytest.raises(InvalidArgument, match="not a layout"):
        LatentLayout.from_dict(raw)


def test_a_hugging_face_config_gives_its_layout():
    config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61, "torch_dtype": "bfloat16"}
    assert LatentLayout.from_hf_config(config) == PRESETS["deepseek-v3"]
    assert LatentLayout.from_hf_config({"text_config": config}) == PRESETS["kimi-k2"]
    assert LatentLayout.from_hf_config(config | {"dtype": "float32"}).dtype is DType.FP32
    assert LatentLayout.from_hf_config(config, DType.FP8).dtype is DType.FP8


def test_a_model_without_latents_is_refused_by_name():
    with pytest.raises(NotMLA, match="llama"):
        LatentLayout.from_hf_config({"model_type": "llama", "num_hidden_layers": 32})


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(InvalidArgument, match="deepseek-v3"):
        preset("gpt")


def test_a_strip_needs_bytes_and_a_config_needs_layers():
    with pytest.raises(InvalidArgument, match="strip 'keys' nbytes"):
        LatentLayout(num_layers=1, strips=(Strip("keys", 0),))
    with pytest.raises(NotMLA, match="num_hidden_layers=None"):
        LatentLayout.from_hf_config({"kv_lora_rank": 512, "qk_rope_head_dim": 64})
