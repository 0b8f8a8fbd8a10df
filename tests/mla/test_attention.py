"""The attention function by itself, against fp64."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from kvstore.errors import InvalidArgument
from mla import Unsupported
from mla.absorb import UpProjection, kv_b_weight
from mla.attention import EXPAND_FROM, DenseContext, Form, PagedContext, choose_form, latent_attention
from mla.online import Tiling
from mla.reference import reference_attention
from tests.mla.zoo import relative

HEADS, NOPE, ROPE, VALUE, RANK = 4, 32, 64, 48, 512


def case(length, queries, dtype, scale=1.0, seed=0):
    """Query, latents, rope keys and projection of one row; scores have deviation ``scale``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    weight = normal(HEADS * (NOPE + VALUE), RANK) / RANK**0.5
    projection = nn.Linear(RANK, weight.shape[0], bias=False)
    with torch.no_grad():
        projection.weight.copy_(weight)
    query = scale * normal(1, HEADS, queries, NOPE + ROPE)
    latent, rope = normal(1, 1, length, RANK), normal(1, 1, length, ROPE)
    up = UpProjection(projection.to(dtype), HEADS, NOPE, VALUE, RANK)
    return query.to(dtype), latent.to(dtype), rope.to(dtype), up, (NOPE + ROPE) ** -0.5


def reference(query, latent, rope, up, scaling):
    return reference_attention(query[0], latent[0, 0], rope[0, 0], up.projection.weight, up.nope, scaling)


def stock_sdpa(query, latent, rope, up, scaling):
    keys, values = up.expand(latent[0, 0])
    key = torch.cat((keys, rope[0].expand(HEADS, -1, -1)), dim=-1)[None]
    length, queries = latent.shape[2], query.shape[2]
    mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    out = functional.scaled_dot_product_attention(query, key, values[None], attn_mask=mask, scale=scaling)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("scale", [0.3, 2.0, 12.0])
@pytest.mark.parametrize("queries", [1, 33, 300])
@torch.no_grad()
def test_bf16_is_no_further_from_fp64_than_one_and_a_half_times_stock_sdpa(queries, scale):
    args = case(2500, queries, torch.bfloat16, scale)
    want = reference(*args)
    ours = latent_attention(args[0], DenseContext(args[1], args[2]), args[3], args[4])[0]
    stock = (stock_sdpa(*args).double() - want).abs()
    error = (ours.double() - want).abs()
    assert float(error.max()) <= 1.5 * float(stock.max())
    assert float(error.square().mean()) <= 1.5**2 * float(stock.square().mean())


@pytest.mark.parametrize("queries", [1, EXPAND_FROM - 1, EXPAND_FROM, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_forms_equal_the_reference_over_several_chunks(queries, dtype):
    args = case(2100, queries, dtype)
    got = latent_attention(args[0], DenseContext(args[1], args[2]), args[3], args[4])[0]
    assert relative(got.double(), reference(*args)) < (1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("queries", [5, 300])
def test_a_shuffled_block_table_gives_the_same_bits_as_contiguous_latents(queries):
    query, latent, rope, up, scaling = case(1000, queries, torch.bfloat16)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:16]
    layer = torch.full((20, 64, RANK + ROPE), torch.nan, dtype=torch.bfloat16)
    entries = functional.pad(torch.cat((latent, rope), dim=-1)[0, 0], (0, 0, 0, 24))
    layer[order] = entries.view(16, 64, -1)
    table = torch.cat((order, torch.tensor([1000])))[None].int()
    dense = latent_attention(query, DenseContext(latent, rope), up, scaling)
    assert torch.equal(latent_attention(query, PagedContext(layer, table), up, scaling), dense)


@pytest.mark.parametrize("queries", [3, 300])
def test_padding_keys_have_no_weight_and_padding_queries_no_nan(queries):
    query, latent, rope, up, scaling = case(400, queries, torch.float32)
    valid = torch.ones(1, 400, dtype=torch.bool)
    valid[:, :130] = False
    got = latent_attention(query, DenseContext(latent, rope), up, scaling, valid)[0]
    assert not got.isnan().any()
    kept = min(queries, 270)
    want = reference(query[:, :, -kept:], latent[:, :, 130:], rope[:, :, 130:], up, scaling)
    assert relative(got[-kept:].double(), want) < 1e-5


class Wrapped(nn.Module):
    """A projection without a plain weight, as quantised or adapted modules are."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("queries", [3, 300])
def test_a_projection_without_a_plain_weight_is_asked_for_it(queries):
    query, latent, rope, up, scaling = case(400, queries, torch.float32)
    wrapped = UpProjection(Wrapped(up.projection), HEADS, NOPE, VALUE, RANK)
    context = DenseContext(latent, rope)
    want = latent_attention(query, context, up, scaling)
    assert relative(latent_attention(query, context, wrapped, scaling), want) < 1e-6


def test_a_hooked_projection_is_asked_too_since_its_weight_may_be_elsewhere():
    projection = nn.Linear(8, 6, bias=False)
    projection.register_forward_hook(lambda module, args, out: 2 * out)
    weight = kv_b_weight(projection, 8, torch.empty(0))
    assert torch.allclose(weight, 2 * projection.weight)


class Adapted(nn.Module):
    """As an adapter with a bias stands in place of a projection."""

    def __init__(self, inner, bias):
        super().__init__()
        self.base_layer, self.bias = inner, bias

    def forward(self, x):
        return self.base_layer(x) + self.bias


@pytest.mark.parametrize("queries", [3, 300])
@pytest.mark.parametrize("kind", ["adapter", "linear"])
def test_a_bias_of_the_projection_is_added_once(queries, kind):
    query, latent, rope, up, scaling = case(400, queries, torch.float32)
    bias = torch.randn(up.projection.out_features, generator=torch.Generator().manual_seed(2))
    projection = Adapted(up.projection, bias)
    both = (latent[0, 0] @ up.projection.weight.T + bias).view(400, HEADS, NOPE + VALUE).transpose(0, 1)
    key = torch.cat((both[..., :NOPE], rope[0].expand(HEADS, -1, -1)), dim=-1)
    future = torch.ones(queries, 400, dtype=torch.bool).triu(400 - queries + 1)
    scores = (scaling * query[0] @ key.transpose(1, 2)).masked_fill(future, -torch.inf)
    want = (scores.softmax(dim=-1) @ both[..., NOPE:]).transpose(0, 1)[None]
    if kind == "linear":
        projection = nn.Linear(RANK, bias.numel())
        projection.weight, projection.bias = up.projection.weight, nn.Parameter(bias)
    biased = UpProjection(projection, HEADS, NOPE, VALUE, RANK)
    got = latent_attention(query, DenseContext(latent, rope), biased, scaling)
    assert relative(got.detach(), want.detach()) < 1e-5


def test_a_projection_that_is_not_linear_is_refused():
    query, latent, rope, up, scaling = case(400, 3, torch.float32)
    bent = UpProjection(nn.Sequential(up.projection, nn.ReLU()), HEADS, NOPE, VALUE, RANK)
    with pytest.raises(Unsupported, match="not linear"):
        latent_attention(query, DenseContext(latent, rope), bent, scaling)


@pytest.mark.parametrize("queries", [3, 300])
def test_autocast_does_not_round_the_scores(queries):
    query, latent, rope, up, scaling = case(400, queries, torch.float32)
    want = latent_attention(query, DenseContext(latent, rope), up, scaling)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = latent_attention(query, DenseContext(latent, rope), up, scaling)
    assert torch.equal(got, want)


def test_fewer_cached_tokens_than_queries_are_refused():
    query, latent, rope, up, scaling = case(10, 10, torch.float32)
    with pytest.raises(InvalidArgument, match="10 queries over a context of 9"):
        latent_attention(query, DenseContext(latent[:, :, :9], rope[:, :, :9]), up, scaling)


def test_the_form_depends_on_the_number_of_queries_alone():
    assert choose_form(1) is Form.ABSORBED
    assert choose_form(EXPAND_FROM - 1) is Form.ABSORBED
    assert choose_form(EXPAND_FROM) is Form.EXPANDED


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rows", [1, 100, 512, 16384, 500_000])
def test_a_tile_of_scores_is_bounded_whatever_is_asked(device, rows):
    tiling = Tiling.of(torch.device(device), 128, rows)
    assert tiling.heads * tiling.rows * tiling.keys <= 1 << 26
    assert min(tiling.heads, tiling.rows, tiling.keys) >= 1
