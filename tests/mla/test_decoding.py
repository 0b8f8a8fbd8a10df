"""Every way of decoding an attached model: the unattached one's answer, or refused before it is computed."""

import copy
import inspect

import pytest
import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin, StaticCache

import mla
from mla import LatentCache, LatentPool, Unsupported
from mla.options import IDLE, REFUSED, SERVED
from tests.mla import decoders
from tests.mla.decoders import PROMPT, WAYS, Way, generated
from tests.mla.zoo import build, forward, relative, tokens

IDS = tokens(PROMPT, seed=2)


@pytest.fixture(scope="module")
def stock():
    return build("deepseek_v3")


@pytest.fixture(scope="module")
def model():
    model = build("deepseek_v3")
    mla.attach(model)
    return model


class Layers:
    """Counts the layers' calls of a model."""

    def __init__(self, model):
        self.calls = 0
        for layer in model.model.layers:
            layer.register_forward_pre_hook(self._count)

    def _count(self, *args):
        self.calls += 1


@pytest.fixture(scope="module")
def layers(model):
    return Layers(model)


def check(way, model, stock, layers):
    before = layers.calls
    if not way.right:
        with torch.no_grad(), pytest.raises(Unsupported):
            way.run(model, IDS)
        assert layers.calls == before
        return
    with torch.no_grad():
        torch.manual_seed(1)
        got = way.run(model, IDS)
        torch.manual_seed(1)
        want = way.run(stock, IDS)
    assert layers.calls > before
    assert got.shape == want.shape
    assert relative(got.float(), want.float()) < 1e-4


@pytest.mark.parametrize("name", WAYS)
def test_a_way_of_calling_is_right_or_refused(name, model, stock, layers):
    check(WAYS[name], model, stock, layers)


@pytest.mark.parametrize("name", decoders.SERVED)
def test_options_of_generate_are_right(name, model, stock, layers):
    def run(model, ids):
        return generated(**decoders.SERVED[name]())(model, ids)

    check(Way(run), model, stock, layers)


@pytest.mark.parametrize("zeros", [0, 2])
def test_a_mask_that_forgets_the_cached_tokens_is_refused(zeros, model, layers):
    cache = DynamicCache(config=model.config)
    forward(model, IDS[:, :90], cache)
    before, mask = layers.calls, torch.ones(1, 60, dtype=torch.long)
    mask[0, :zeros] = 0
    with pytest.raises(Unsupported, match="padding mask for 60 of 150 tokens"):
        forward(model, IDS[:, 90:], cache, attention_mask=mask)
    assert layers.calls == before
    assert cache.get_seq_length() == 90


def test_a_cache_that_the_unattached_model_filled_goes_on(model, stock):
    cache = DynamicCache(config=stock.config)
    forward(stock, IDS[:, :90], cache)
    got = forward(model, IDS[:, 90:], cache)
    assert relative(got, forward(stock, IDS)[:, 90:]) < 1e-4


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}])
def test_drafts_over_a_latent_cache_are_right(options, model, stock):
    with LatentCache(LatentPool(mla.attach(model).layout, 8)) as cache:
        got = generated(past_key_values=cache, **options)(model, IDS)
    assert torch.equal(got, generated()(stock, IDS))


def test_another_model_may_draft(model, stock):
    draft = build("deepseek_v3", num_hidden_layers=1, first_k_dense_replace=1)
    mla.attach(draft)
    assert torch.equal(generated(assistant_model=draft)(model, IDS), generated()(stock, IDS))


def test_gradients_are_refused_wherever_they_would_come_from(model, layers):
    before = layers.calls
    with pytest.raises(Unsupported, match=r"torch\.no_grad"):
        model(IDS)
    frozen = copy.deepcopy(model).requires_grad_(False)
    mla.attach(frozen)
    inputs = frozen.get_input_embeddings()(IDS)
    assert frozen(inputs_embeds=inputs).logits.shape == (1, PROMPT, 128)  # nothing wants gradients
    with pytest.raises(Unsupported, match="no backward pass"):
        frozen(inputs_embeds=inputs.requires_grad_(True))
    frozen.model.layers[1].mlp.gate.weight.requires_grad_(True)
    with pytest.raises(Unsupported, match="no backward pass"):
        frozen(IDS)
    assert layers.calls == before


def test_an_attention_called_by_itself_refuses_gradients(model):
    attention = model.model.layers[0].self_attn
    hidden = torch.randn(1, 9, 64)
    angles = model.model.rotary_emb(hidden, torch.arange(9)[None])
    with pytest.raises(Unsupported, match="no backward pass"):
        attention(hidden, position_embeddings=angles, attention_mask=None)


def test_a_switched_attention_implementation_is_refused_and_attaching_again_mends_it(model, stock, layers):
    before = layers.calls
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with pytest.raises(Unsupported, match=f"switched to '{implementation}'"):
            forward(model, IDS)
    model.config._attn_implementation = "eager"
    with pytest.raises(Unsupported, match="switched to 'eager'"):
        generated()(model, IDS)
    assert layers.calls == before
    mla.attach(model)
    assert relative(forward(model, IDS), forward(stock, IDS)) < 1e-4


def test_detaching_keeps_the_implementation_that_somebody_has_chosen_since():
    model = build("deepseek_v3")
    mla.attach(model)
    model.set_attn_implementation("eager")
    mla.detach(model)
    assert model.config._attn_implementation == "eager"
    assert forward(model, IDS).shape == (1, PROMPT, 128)


def test_a_detached_model_is_as_it_was(stock):
    model = build("deepseek_v3")
    implementation = model.config._attn_implementation
    mla.attach(model)
    mla.detach(model)
    assert model.config._attn_implementation == implementation
    assert torch.equal(generated(cache_implementation="static")(model, IDS), generated()(stock, IDS))
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert model.lm_head.weight.grad is not None
    assert not model.model._forward_pre_hooks


def test_a_copy_of_an_attached_model_is_refused_whatever_it_runs_and_can_be_detached(model, stock):
    twin = copy.deepcopy(model)
    for implementation in ("latentkv", "sdpa"):
        twin.config._attn_implementation = implementation
        with pytest.raises(Unsupported, match="copy of an attached model"):
            forward(twin, IDS)
    mla.attach(twin)
    assert relative(forward(twin, IDS), forward(stock, IDS)) < 1e-4
    mla.detach(twin)
    assert twin.config._attn_implementation == stock.config._attn_implementation
    assert torch.equal(forward(twin, IDS), forward(stock, IDS))


def test_layers_that_train_alone_are_refused(model):
    model.model.layers[1].self_attn.train()
    try:
        with pytest.raises(Unsupported, match=r"model\.eval"):
            forward(model, IDS)
    finally:
        model.eval()


def test_autocast_is_that_of_the_unattached_model(model, stock):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = forward(model, IDS), forward(stock, IDS)
    off = (got - want).abs().median() / want.abs().median()  # a token near a tie may go to another expert
    assert float(off) < 0.02


def test_a_compiled_model_answers_the_same_and_refuses_the_same(stock):
    model = build("deepseek_v3")
    compiled = torch.compile(model, backend="eager")
    mla.attach(compiled)
    with torch.no_grad():
        assert relative(compiled(IDS).logits, forward(stock, IDS)) < 1e-4
        with pytest.raises(Unsupported):
            compiled(IDS, past_key_values=StaticCache(config=model.config, max_cache_len=256))
    mla.detach(model)


def test_tracing_is_refused_since_it_would_fix_the_lengths(model):
    with torch.no_grad(), pytest.raises(Unsupported, match="tracing an attached model"):
        torch.jit.trace(lambda ids: model(ids, use_cache=False).logits, (IDS,), check_trace=False)


@pytest.mark.parametrize("where", ["memory", "directory"])
def test_a_saved_model_carries_nothing_that_a_plain_one_could_not_load(where, stock, tmp_path):
    model = build("deepseek_v3")
    mla.attach(model)
    if where == "directory":
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        assert torch.equal(forward(loaded, IDS), forward(stock, IDS))
        return
    torch.save(model, tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    with pytest.raises(Unsupported, match="copy of an attached model"):
        forward(loaded, IDS)
    mla.attach(loaded)
    mla.detach(loaded)
    assert torch.equal(forward(loaded, IDS), forward(stock, IDS))


def test_a_wrapper_that_hides_the_model_is_refused_by_name():
    with pytest.raises(
        Unsupported, match="DataParallel is no model of transformers: attach the model inside"
    ):
        mla.attach(nn.DataParallel(build("deepseek_v3")))


def test_a_wrapped_attached_model_answers_the_same(model, stock):
    wrapped = nn.DataParallel(model)
    with torch.no_grad():
        assert relative(wrapped(IDS).logits, forward(stock, IDS)) < 1e-4


def test_a_model_that_was_cast_meets_a_cache_of_its_former_dtype_by_name():
    model = build("deepseek_v3")
    with LatentCache(LatentPool(mla.attach(model).layout, 8)) as cache:
        model.half()
        with pytest.raises(ValueError, match="make it with the model's layout"):
            forward(model, IDS, cache)


def test_every_option_that_transformers_has_is_served_or_refused_on_purpose():
    # A new one in a later transformers is refused by a session until it was looked at: here.
    parameters = inspect.signature(GenerationMixin.generate).parameters
    options = set(parameters) - {"self", "kwargs"} | set(vars(GenerationConfig()))
    known = SERVED | IDLE | set(REFUSED)
    assert {name for name in options if not name.startswith("_")} <= known
    assert not SERVED & set(REFUSED)
    assert not IDLE & (SERVED | set(REFUSED))
