"""Quantised and unusual weights: served as the unattached model answers, or refused by name when attached."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, weight_norm

import mla
from mla import LatentCache, LatentPool, Unsupported
from mla.absorb import kv_b_weight
from tests.mla.zoo import build, forward, relative, tokens

IDS = tokens(90)


def at(model, layer=1):
    return model.model.layers[layer].self_attn


class Rounded(nn.Module):
    """int8 weights, a scale a row: what weight-only quantisation does."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("rounded", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x):
        return nn.functional.linear(x, self.rounded.to(x.dtype) * self.scale.to(x.dtype))


class RoundedByToken(Rounded):
    """... and activations in int8, a scale a token."""

    def forward(self, x):
        scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-9) / 127
        return super().forward((x / scale).round() * scale)


class RoundedByBatch(Rounded):
    """... and one scale for all tokens of a call, as dynamic quantisation of whole tensors has."""

    def forward(self, x):
        scale = x.abs().amax().clamp_min(1e-9) / 127
        return super().forward((x / scale).round() * scale)


class Gated(Rounded):
    def forward(self, x):
        return torch.relu(super().forward(x))


class Curved(Rounded):
    def forward(self, x):
        return super().forward(x + 0.03 * x * x.abs())


class Biased(Rounded):
    def forward(self, x):
        return super().forward(x) + 0.5


class Broken(Rounded):
    def forward(self, x):
        raise NotImplementedError("no kernel for this machine")


class Wide(Rounded):
    def forward(self, x):
        return super().forward(x)[..., 1:]


class NotANumber(Rounded):
    def forward(self, x):
        return super().forward(x) * torch.nan


class Pair(Rounded):
    def forward(self, x):
        return super().forward(x), None


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * 1.5


def replaced(make, name="kv_b_proj"):
    def change(model):
        for layer in model.model.layers:
            setattr(layer.self_attn, name, make(getattr(layer.self_attn, name)))
        return model

    return change


def parametrized(model):
    for layer in model.model.layers:
        parametrize.register_parametrization(layer.self_attn.kv_b_proj, "weight", Scaled())
    return model


def normed(model):
    for layer in model.model.layers:
        parametrizations.weight_norm(layer.self_attn.kv_b_proj)
    return model


def normed_by_hook(model):
    for layer in model.model.layers:
        weight_norm(layer.self_attn.kv_b_proj)
    return model


def offloaded(model):
    """As accelerate does it: weights on meta, and a `forward` of the instance that fetches them."""
    for layer in model.model.layers:
        linear = layer.self_attn.kv_b_proj
        kept = linear.weight.detach().clone()
        linear.weight = nn.Parameter(linear.weight.to("meta"))
        vars(linear)["forward"] = lambda x, kept=kept: nn.functional.linear(x, kept)
    return model


SERVED = {
    "int8 weights": replaced(Rounded),
    "int8 weights before the latent": replaced(Rounded, "kv_a_proj_with_mqa"),
    "parametrised": parametrized,
    "weight_norm": normed,
    "weight_norm by a hook": normed_by_hook,
    "offloaded": offloaded,
    "a bias": replaced(Biased),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", SERVED)
def test_linear_maps_of_any_make_answer_as_before(name):
    stock, model = SERVED[name](build("deepseek_v3")), SERVED[name](build("deepseek_v3"))
    info = mla.attach(model)
    with LatentCache(LatentPool(info.layout, 4)) as cache:
        got = torch.cat([forward(model, part, cache) for part in IDS.split(40, dim=1)], dim=1)
    assert relative(got, forward(stock, IDS)) < 1e-4


def test_activations_rounded_token_by_token_are_served_as_well_as_they_round():
    stock, model = (
        replaced(RoundedByToken)(build("deepseek_v3")),
        replaced(RoundedByToken)(build("deepseek_v3")),
    )
    mla.attach(model)
    off = (forward(model, IDS) - forward(stock, IDS)).abs().median() / forward(stock, IDS).abs().median()
    assert float(off) < 0.05


REFUSED = {
    RoundedByBatch: "rounds a token by the tokens beside it",
    Gated: "no linear map",
    Curved: "no linear map",
    Broken: "NotImplementedError: no kernel for this machine",
    Wide: "no multiple of 44",
    NotANumber: "does not make finite rows",
    Pair: "does not make finite rows",
}


def refused(model, match):
    implementation = model.config._attn_implementation
    with pytest.raises(Unsupported, match=match) as caught:
        mla.attach(model)
    assert model.config._attn_implementation == implementation
    assert not model.model._forward_pre_hooks
    return str(caught.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_linear_map_of_each_token_is_refused_by_name(kind):
    model = build("deepseek_v3")
    at(model).kv_b_proj = kind(at(model).kv_b_proj)
    message = refused(model, REFUSED[kind])
    assert "model.layers.1.self_attn.kv_b_proj" in message
    assert kind.__qualname__ in message


@pytest.mark.parametrize("name", ["q_a_proj", "kv_a_proj_with_mqa"])
def test_what_mixes_tokens_is_found_before_the_latent_too(name):
    model = build("deepseek_v3")
    setattr(at(model), name, RoundedByBatch(getattr(at(model), name)))
    assert f"layers.1.self_attn.{name}" in refused(model, "rounds a token by the tokens beside it")


@pytest.mark.filterwarnings("ignore:.*quant")
def test_torchs_dynamic_int8_is_refused_by_name():
    model = torch.ao.quantization.quantize_dynamic(build("deepseek_v3"), {nn.Linear}, dtype=torch.qint8)
    assert "quantized.dynamic" in refused(model, "rounds a token by the tokens beside it")


@pytest.mark.filterwarnings("ignore:.*quant")
@pytest.mark.parametrize("name", ["q_a_proj", "o_proj"])
def test_dynamic_int8_anywhere_is_refused_since_blocks_would_depend_on_their_neighbours(name):
    model = build("deepseek_v3")
    whole = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    setattr(at(model), name, getattr(at(whole), name))
    assert f"layers.1.self_attn.{name}" in refused(model, "rounds a token")


@pytest.mark.filterwarnings("ignore:.*quant")
def test_dynamic_fp16_is_served():
    def make():
        return torch.ao.quantization.quantize_dynamic(build("deepseek_v3"), {nn.Linear}, dtype=torch.float16)

    model = make()
    mla.attach(model)
    assert relative(forward(model, IDS), forward(make(), IDS)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_a_projection_of_another_dtype_is_refused_by_name(dtype):
    model = build("deepseek_v3")
    at(model).kv_b_proj.weight = nn.Parameter(at(model).kv_b_proj.weight.to(dtype))
    assert "layers.1.self_attn.kv_b_proj.weight" in refused(model, f"is {dtype} in a model of torch.float32")


def test_weights_without_numbers_are_refused_by_name():
    model = build("deepseek_v3")
    at(model).o_proj.weight = nn.Parameter(at(model).o_proj.weight.to("meta"))
    refused(model, r"layers\.1\.self_attn\.o_proj\.weight is on the meta device")


def test_what_comes_after_attaching_is_looked_at_when_it_is_met():
    stock, model = build("deepseek_v3"), build("deepseek_v3")
    mla.attach(model)
    for one in (stock, model):
        at(one).kv_b_proj = Biased(at(one).kv_b_proj)
    assert relative(forward(model, IDS), forward(stock, IDS)) < 1e-4
    at(model).kv_b_proj = Gated(build("deepseek_v3").model.layers[1].self_attn.kv_b_proj)
    with pytest.raises(Unsupported, match="Gated that is not linear"):
        forward(model, IDS)


def test_a_tensor_of_another_class_is_no_plain_weight():
    class Packed(torch.Tensor):
        pass

    linear = nn.Linear(4, 6, bias=False)
    want = linear.weight.detach().clone()
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Packed))
    got = kv_b_weight(linear, 4, want)
    assert got is not linear.weight
    assert torch.allclose(got, want)
