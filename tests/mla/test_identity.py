"""What names a model: rope parameters, weights; and the built-in tiny model."""

import json

import pytest
import torch

from kvstore.layout import TINY
from mla import Unsupported, inspect_model
from mla.fingerprint import weights_fingerprint
from mla.rope import check_rope_length, rope_json, rope_limit
from mla.tiny import MAX_TOKENS, tiny_model
from tests.mla.zoo import YARN, build


def test_rope_json_is_canonical_and_differs_with_every_parameter():
    config = {"rope_parameters": YARN, "qk_rope_head_dim": 64, "rope_interleave": True}
    text = rope_json(config)
    assert text == rope_json({**config, "rope_parameters": dict(reversed(YARN.items()))})
    assert json.loads(text)["parameters"] == YARN
    others = [{**config, "rope_parameters": {**YARN, key: 9}} for key in YARN if key != "rope_type"]
    others += [{**config, "qk_rope_head_dim": 32}, {**config, "rope_interleave": False}]
    assert len({text, *map(rope_json, others)}) == len(others) + 1


def test_rope_limits():
    assert rope_limit({}) is None
    assert rope_limit({"rope_parameters": YARN}) is None
    longrope = {"rope_type": "longrope"}
    assert rope_limit({"rope_parameters": longrope, "max_position_embeddings": 7}) == 7
    check_rope_length(None, 1 << 20)
    check_rope_length(7, 7)
    with pytest.raises(Unsupported, match="8 tokens"):
        check_rope_length(7, 8)


def test_a_fingerprint_follows_the_weights_and_their_dtype():
    model = build("deepseek_v3")
    name = weights_fingerprint(model)
    assert name == weights_fingerprint(build("deepseek_v3"))
    assert len(name) == 32
    assert name != weights_fingerprint(build("deepseek_v3").bfloat16())
    with torch.no_grad():
        model.model.layers[1].self_attn.kv_b_proj.weight.mul_(1.001)
    assert name != weights_fingerprint(model)


def test_one_row_of_a_projection_is_seen():
    model = tiny_model()
    name = weights_fingerprint(model)
    model.model.layers[2].self_attn.kv_a_proj_with_mqa.weight.data[3] += 0.5
    assert name != weights_fingerprint(model)


def test_a_fingerprint_follows_one_number_of_any_tensor_and_its_place():
    model = build("deepseek_v3")
    names = {weights_fingerprint(model)}
    tensors = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        flat = tensor.data.view(-1)
        kept = flat[-1].clone()
        flat[-1] += 1
        names.add(weights_fingerprint(model))
        flat[-1] = kept
    assert len(names) == len(tensors) + 1
    first, second = (layer.input_layernorm for layer in model.model.layers)
    first.weight, second.weight = second.weight, first.weight
    assert weights_fingerprint(model) not in names


def test_weights_that_are_tied_or_not_are_named_alike_and_strides_do_not_matter():
    model = build("deepseek_v3")
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    name = weights_fingerprint(model)
    model.lm_head.weight = model.model.embed_tokens.weight
    assert weights_fingerprint(model) == name
    projection = model.model.layers[0].self_attn.o_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().t().contiguous().t())
    assert weights_fingerprint(model) == name


def test_weights_that_are_not_here_have_no_fingerprint():
    with pytest.raises(Unsupported, match="pass the revision by name"):
        weights_fingerprint(build("youtu").to("meta"))


def test_tiny_has_the_preset_layout_and_weights_that_its_seed_determines():
    torch.manual_seed(1)
    model = tiny_model()
    torch.manual_seed(2)
    assert inspect_model(model).layout == TINY
    assert not model.training
    assert model.config.max_position_embeddings == MAX_TOKENS
    assert weights_fingerprint(model) == weights_fingerprint(tiny_model())
    assert weights_fingerprint(model) != weights_fingerprint(tiny_model(seed=1))
