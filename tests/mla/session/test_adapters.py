"""PEFT's adapters: every state of them is another model, and only the base has the base's name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mla import Unsupported
from tests.mla.session.conftest import logits, text
from tests.mla.zoo import build, relative

peft = pytest.importorskip("peft", reason="PEFT is not installed; `dev` has it")

PROMPT = text(400, seed=30)
LAYERS = ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]

State = Callable[[Any], None]


def adapted(model: PreTrainedModel) -> Any:
    """Two adapters, ``a`` active; ``b`` has a bias on each layer, so on ``kv_b_proj`` too."""
    wrapped = peft.get_peft_model(model, lora(), adapter_name="a")
    wrapped.add_adapter("b", lora(lora_bias=True))
    fill(wrapped, "lora_", 1)
    return wrapped.eval()


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": LAYERS} | changes)


def fill(model: Any, part: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if part in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))


def scale(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.scaling["a"] *= 2


def load_later(model: Any) -> None:
    model.add_adapter("c", lora())
    fill(model, ".c.", 2)
    model.eval()


def change_a_number(model: Any) -> None:
    with torch.no_grad():
        model.base_model.model.model.layers[0].self_attn.o_proj.lora_B["a"].weight[0, 0] += 0.5


def unmerged(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


STATES: dict[str, State] = {
    "active": lambda model: None,
    "another one, with a bias": lambda model: model.set_adapter("b"),
    "both": lambda model: model.base_model.set_adapter(["a", "b"]),
    "scaled": scale,
    "a number of it": change_a_number,
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "one more loaded": load_later,
    "one more active": lambda model: (load_later(model), model.set_adapter("c")),
    "merged": lambda model: model.merge_adapter(),
    "merged and unmerged": unmerged,
    "deleted": lambda model: (model.set_adapter("b"), model.delete_adapter("a")),
}


@torch.no_grad()
def stock(model: Any) -> Tensor:
    return copy.deepcopy(model)(torch.tensor([PROMPT])).logits[:, -1]


@pytest.mark.parametrize("name", STATES)
def test_every_state_of_adapters_has_a_name_of_its_own(name, workers, embedded):
    store = embedded()
    plain = workers(build("deepseek_v3"), store)
    plain.ask(PROMPT)
    model, reference = build("deepseek_v3"), adapted(build("deepseek_v3"))
    session = workers(model, store)  # opened before there was any adapter
    assert session.hit(PROMPT) == 384
    wrapped = adapted(model)
    if name != "active":
        session.ask(PROMPT)
        assert session.session.flush(10)
    for one in (wrapped, reference):
        STATES[name](one)
    answer = session.ask(PROMPT)
    assert answer.usage.prompt_cache_hit_tokens == 0
    assert relative(logits(answer), stock(reference)) < 1e-4
    assert session.session.flush(10)
    again = workers(model, store).ask(PROMPT)
    assert again.usage.prompt_cache_hit_tokens == 384
    assert relative(logits(again), stock(reference)) < 1e-4
    assert plain.hit(PROMPT) == 384
    assert relative(logits(plain.ask(PROMPT)), stock(build("deepseek_v3"))) < 1e-4


def test_a_model_inside_of_its_wrapper_is_served_too(workers, embedded):
    store, wrapped = embedded(), adapted(build("deepseek_v3"))
    worker = workers(wrapped, store)
    answer = worker.ask(PROMPT)
    assert relative(logits(answer), stock(adapted(build("deepseek_v3")))) < 1e-4
    assert worker.hit(PROMPT) == 384
    wrapped.set_adapter("b")
    assert worker.hit(PROMPT) == 0


def test_adapters_are_named_beside_a_revision_too(workers, embedded):
    store, model = embedded(), build("deepseek_v3")
    base = workers(model, store, revision="v1")
    base.ask(PROMPT)
    assert base.session.flush(10)
    wrapped = adapted(model)
    assert base.hit(PROMPT) == 0
    change_a_number(wrapped)
    assert base.hit(PROMPT) == 0
    assert workers(build("deepseek_v3"), store, revision="v1").hit(PROMPT) == 384


def test_learned_prompts_and_dropout_are_refused(workers):
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    with pytest.raises(Unsupported, match="learned tokens"):
        workers(peft.get_peft_model(build("deepseek_v3"), config).eval(), None)
    training = peft.get_peft_model(build("deepseek_v3"), lora(lora_dropout=0.5))
    with pytest.raises(Unsupported, match=r"call model.eval\(\) first"):
        workers(training, None)
