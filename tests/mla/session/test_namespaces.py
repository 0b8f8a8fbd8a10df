"""Sessions that differ in anything on which a latent depends never hit each other's blocks."""

import pytest
import torch
from transformers import PreTrainedModel

from tests.mla.session.conftest import text
from tests.mla.zoo import YARN, build

PROMPT = text(400)


@pytest.fixture
def stored(model, workers, embedded):
    """A store that has PROMPT from a plain session over ``model``."""
    store = embedded()
    worker = workers(model, store)
    worker.ask(PROMPT)
    assert worker.session.flush()
    assert workers(model, store).hit(PROMPT) == 384
    return store


SETTINGS = {
    "tenant": {"tenant": "another"},
    "salt": {"salt": "pepper"},
    "adapter": {"adapter": "lora-7"},
    "revision": {"revision": "main"},
    "model name": {"model_name": "another"},
    "exact": {"exact": True},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_session_of_other_settings_misses(settings, model, workers, stored):
    assert workers(model, stored, **settings).hit(PROMPT) == 0


def other_weights() -> PreTrainedModel:
    model = build("deepseek_v3")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    return model


MODELS = {
    "weights": other_weights,
    "dtype": lambda: build("deepseek_v3").bfloat16(),
    "rope": lambda: build("deepseek_v3", rope_parameters=YARN),
    "rope base": lambda: build("deepseek_v3", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "rope layout": lambda: build("deepseek_v3", rope_interleave=False),
    # Equal weights, but other latents behind the first MoE layer.
    "experts a token": lambda: build("deepseek_v3", num_experts_per_tok=1),
    "norm's epsilon": lambda: build("deepseek_v3", rms_norm_eps=1e-3),
}


@pytest.mark.parametrize("other", MODELS.values(), ids=MODELS)
def test_another_model_misses(other, workers, stored):
    assert workers(other(), stored).hit(PROMPT) == 0


def test_it_misses_under_a_revision_given_by_name_too(model, workers, embedded):
    store = embedded()
    worker = workers(model, store, revision="v1")
    worker.ask(PROMPT)
    assert worker.session.flush()
    assert workers(build("deepseek_v3"), store, revision="v1").hit(PROMPT) == 384
    assert workers(MODELS["experts a token"](), store, revision="v1").hit(PROMPT) == 0


def test_what_does_not_change_latents_is_shared(workers, stored):
    twin = build("deepseek_v3")
    twin.config._name_or_path = "/elsewhere"
    twin.config.use_cache = False
    assert workers(twin, stored).hit(PROMPT) == 384


def test_other_tokens_miss(model, workers, stored):
    assert workers(model, stored).hit([(PROMPT[0] + 1) % 128, *PROMPT[1:]]) == 0
    assert workers(model, stored).hit([*PROMPT[:63], (PROMPT[63] + 1) % 128, *PROMPT[64:]]) == 0
