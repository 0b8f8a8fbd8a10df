"""A model that changes is another model: no hit of before, in the same session and in a new one."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize
from transformers import PreTrainedModel

from mla import Unsupported
from mla.session import Session
from tests.mla.session.conftest import logits, text
from tests.mla.zoo import build, relative

PROMPT = text(400, seed=20)


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every parameter and buffer, also those that no state dict has."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def truth(model: PreTrainedModel) -> Tensor:
    """Logits of the next token by a session of its own without a store."""
    with Session(copy.deepcopy(model), None, prefill_chunk=128) as session:
        return logits(session.generate(PROMPT, max_new_tokens=1, do_sample=False, output_logits=True))


def alter_one_element(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[tensor.numel() // 2].add_(0.5)


@pytest.mark.parametrize("name", sorted(tensors_of(build("deepseek_v3"))))
def test_one_element_of_any_tensor_is_noticed_in_the_session_and_in_a_new_one(name, workers, embedded):
    model, store = build("deepseek_v3"), embedded()
    worker = workers(model, store)
    worker.ask(PROMPT)
    assert worker.session.flush(10)
    assert worker.hit(PROMPT) == 384
    alter_one_element(tensors_of(model)[name])
    answer = worker.ask(PROMPT)
    assert answer.usage.prompt_cache_hit_tokens == 0
    assert torch.equal(logits(answer), truth(model))
    other = build("deepseek_v3")
    alter_one_element(tensors_of(other)[name])
    assert worker.session.flush(10)
    assert workers(other, store).hit(PROMPT) == 384  # equal again: what the changed one stored


def add_under_no_grad(weight: Tensor) -> None:
    with torch.no_grad():
        weight[3].add_(0.5)


def add_in_inference_mode(weight: Tensor) -> None:
    with torch.inference_mode():
        weight[3].add_(0.5)


def add_through_data(weight: Tensor) -> None:
    weight.data[3] += 0.5


def copy_through_data(weight: Tensor) -> None:
    weight.data.copy_(weight.data * 1.01)


def set_data(weight: Tensor) -> None:
    weight.data = weight.data * 1.01


def swap_two_rows(weight: Tensor) -> None:
    with torch.no_grad():
        weight[[1, 2]] = weight[[2, 1]]


def step_of_an_optimizer(weight: Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.1).step()
    weight.grad = None


@pytest.mark.parametrize(
    "change",
    [
        add_under_no_grad,
        add_in_inference_mode,
        add_through_data,
        copy_through_data,
        set_data,
        swap_two_rows,
        step_of_an_optimizer,
    ],
)
def test_every_way_of_writing_to_a_weight_is_noticed_by_the_pool_too(change: Callable[[Tensor], None]):
    model = build("deepseek_v3")
    with Session(model, None, prefill_chunk=128) as session:  # the pool is the only tier

        def hit() -> int:
            return session.generate(PROMPT, max_new_tokens=1).usage.prompt_cache_hit_tokens

        assert (hit(), hit()) == (0, 384)
        change(model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight)
        assert (hit(), hit()) == (0, 384)


def test_a_weight_that_was_replaced_is_noticed(workers):
    model = build("deepseek_v3")
    worker = workers(model, None)
    worker.ask(PROMPT)
    projection = model.model.layers[0].self_attn.kv_a_proj_with_mqa
    projection.weight = nn.Parameter(projection.weight.detach() * 1.01)
    assert worker.hit(PROMPT) == 0
    assert worker.hit(PROMPT) == 384
    model.model.layers[1].self_attn.o_proj = copy.deepcopy(model.model.layers[1].self_attn.q_b_proj)
    model.model.layers[1].self_attn.o_proj = nn.Linear(80, 64, bias=False)
    assert worker.hit(PROMPT) == 0


def test_a_weight_that_is_as_it_was_finds_what_it_had_stored(workers, embedded):
    model = build("deepseek_v3")
    worker = workers(model, embedded())
    worker.ask(PROMPT)
    assert worker.session.flush(10)
    weight = model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight
    kept = weight.detach().clone()
    add_under_no_grad(weight)
    assert worker.hit(PROMPT) == 0
    with torch.no_grad():
        weight.copy_(kept)
    assert worker.hit(PROMPT) == 384


class Scaled(nn.Module):
    """Somebody's adapter: a class of no package that we know, with a plain number."""

    def __init__(self, base_layer: nn.Module, scaling: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scaling = {"default": scaling}

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * self.scaling["default"]


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def scale(model: PreTrainedModel, scaling: float = 1.5) -> None:
    model.model.layers[0].mlp.down_proj = Scaled(model.model.layers[0].mlp.down_proj, scaling)


def change_the_scaling(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.down_proj.scaling["default"] = 2.0


def change_an_epsilon(model: PreTrainedModel) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def change_the_softmax(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def route_to_one_expert(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.top_k = 1
    model.model.layers[1].mlp.gate.top_k = 1


def change_the_activation(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def parametrized(model: PreTrainedModel) -> None:
    parametrize.register_parametrization(model.model.layers[0].self_attn.o_proj, "weight", Half())


def weight_normed(model: PreTrainedModel) -> None:
    projection = parametrizations.weight_norm(model.model.layers[0].self_attn.o_proj)
    with torch.no_grad():
        projection.parametrizations.weight.original0.mul_(2)


def steered_subclass(model: PreTrainedModel) -> None:
    layer = model.model.layers[0].mlp

    class Steered(type(layer)):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    layer.__class__ = Steered


def keep_a_vector(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.offset = torch.ones(64)  # neither parameter nor buffer


@pytest.mark.parametrize(
    "change",
    [
        scale,
        change_an_epsilon,
        change_the_softmax,
        route_to_one_expert,
        change_the_activation,
        parametrized,
        weight_normed,
        steered_subclass,
        keep_a_vector,
    ],
)
def test_what_no_state_dict_has_is_part_of_the_name(change, workers, embedded):
    store = embedded()
    model = build("deepseek_v3")
    worker = workers(model, store)
    worker.ask(PROMPT)
    assert worker.session.flush(10)
    change(model)
    answer = worker.ask(PROMPT)
    assert answer.usage.prompt_cache_hit_tokens == 0
    assert worker.hit(PROMPT) == 384
    other = build("deepseek_v3")
    change(other)
    assert workers(build("deepseek_v3"), store).hit(PROMPT) == 384
    fresh = workers(other, store).ask(PROMPT)
    assert torch.equal(logits(fresh), logits(answer))


def test_a_number_in_an_adapter_of_any_kind_is_part_of_the_name(workers, embedded):
    model = build("deepseek_v3")
    scale(model)
    worker = workers(model, embedded(), revision="v1")  # whoever names the weights does not name adapters
    worker.ask(PROMPT)
    assert worker.hit(PROMPT) == 384
    change_the_scaling(model)
    assert worker.hit(PROMPT) == 0


def test_a_method_patched_into_a_class_is_part_of_the_name(workers, monkeypatch):
    model = build("deepseek_v3")
    worker = workers(model, None)
    worker.ask(PROMPT)
    kind = type(model.model.layers[0].mlp)
    stock = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: stock(self, x) + 1)
    assert worker.hit(PROMPT) == 0


def test_equal_models_share_however_they_were_made(workers, embedded, tmp_path):
    store = embedded()
    worker = workers(build("deepseek_v3"), store)
    worker.ask(PROMPT)
    assert worker.session.flush(10)
    build("deepseek_v3").save_pretrained(tmp_path / "model")
    kind = type(build("deepseek_v3"))
    loaded = kind.from_pretrained(tmp_path / "model").eval()
    assert workers(loaded, store).hit(PROMPT) == 384
    assert workers(copy.deepcopy(build("deepseek_v3")), store).hit(PROMPT) == 384


def test_a_revision_given_by_name_holds_until_the_weights_change(workers, embedded, caplog):
    caplog.set_level("INFO", "mla.weights")
    model, store = build("deepseek_v3"), embedded()
    worker = workers(model, store, revision="v1")
    assert "the weights are named 'v1'" in caplog.text
    worker.ask(PROMPT)
    assert worker.session.flush(10)
    assert workers(build("deepseek_v3"), store, revision="v1").hit(PROMPT) == 384
    add_under_no_grad(model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight)
    assert worker.hit(PROMPT) == 0
    assert worker.hit(PROMPT) == 384


# --- what steers from outside


def add_one(module: nn.Module, inputs: Any, output: Any) -> Any:
    return (output[0] + 1, *output[1:]) if isinstance(output, tuple) else output + 1


def add_in_place(module: nn.Module, inputs: Any, output: Any) -> None:
    (output[0] if isinstance(output, tuple) else output).add_(1)


def give_other_inputs(module: nn.Module, inputs: Any) -> Any:
    return (inputs[0] * 0, *inputs[1:])


def look(module: nn.Module, *seen: Any) -> None:
    return None


@dataclass(frozen=True)
class Steering:
    """Registers a hook or the like; gives back how to undo it."""

    register: Callable[[PreTrainedModel], Callable[[], None]]
    says: str


def replace_forward(model: PreTrainedModel) -> Callable[[], None]:
    mlp = model.model.layers[1].mlp
    mlp.forward = types.MethodType(lambda self, x: x, mlp)
    return lambda: vars(mlp).pop("forward")


def old_weight_norm(model: PreTrainedModel) -> Callable[[], None]:
    projection = model.model.layers[0].self_attn.o_proj
    nn.utils.weight_norm(projection)
    return lambda: nn.utils.remove_weight_norm(projection)


def steer_one_layer_by_a_global_hook(model: PreTrainedModel) -> Callable[[], None]:
    layer = model.model.layers[0].mlp
    return register_module_forward_hook(
        lambda module, inputs, output: output + 1 if module is layer else None
    ).remove


STEERING = {
    "a layer's output": Steering(
        lambda model: model.model.layers[0].register_forward_hook(add_one).remove,
        "model.layers.0 has a forward hook",
    ),
    "in place": Steering(
        lambda model: model.model.layers[0].mlp.register_forward_hook(add_in_place).remove, "add_in_place"
    ),
    "a layer's input": Steering(
        lambda model: model.model.layers[1].mlp.register_forward_pre_hook(give_other_inputs).remove,
        "has a forward hook",
    ),
    "the model": Steering(
        lambda model: model.register_forward_hook(look, with_kwargs=True).remove,
        "the model has a forward hook",
    ),
    "the embedding": Steering(
        lambda model: model.get_input_embeddings().register_forward_hook(add_one).remove, "changes what a"
    ),
    "the embedding in place": Steering(
        lambda model: model.get_input_embeddings().register_forward_hook(add_in_place).remove,
        "changes what a",
    ),
    "the embedding's input": Steering(
        lambda model: model.get_input_embeddings().register_forward_pre_hook(give_other_inputs).remove,
        "changes what a",
    ),
    "every module": Steering(steer_one_layer_by_a_global_hook, "changes what a"),
    "forward": Steering(replace_forward, "has a forward of its own"),
    "old weight norm": Steering(old_weight_norm, "WeightNorm"),
}


@pytest.mark.parametrize("name", STEERING)
def test_what_steers_is_refused_and_leaves_nothing(name, workers, embedded):
    steering, store = STEERING[name], embedded()
    model = build("deepseek_v3")
    worker = workers(model, store)
    undo = steering.register(model)
    with pytest.raises(Unsupported, match=steering.says):
        worker.session.generate(PROMPT, max_new_tokens=1)
    with pytest.raises(Unsupported, match=steering.says):
        worker.session.prefill(PROMPT)
    undo()
    assert worker.session.flush(10)
    assert store.status().units == 0
    assert worker.hit(PROMPT) == 0
    assert relative(logits(worker.ask(PROMPT)), truth(build("deepseek_v3"))) < 1e-5


def test_hooks_that_watch_the_embedding_or_every_module_are_let_be(workers):
    model = build("deepseek_v3")
    worker = workers(model, None)
    with model.get_input_embeddings().register_forward_pre_hook(look), register_module_forward_hook(look):
        worker.ask(PROMPT)
        assert worker.hit(PROMPT) == 384


def test_hidden_states_that_transformers_records_steer_nothing(workers):
    model = build("deepseek_v3")
    model(torch.tensor([PROMPT[:8]]), output_hidden_states=True)  # leaves its hooks on the layers
    worker = workers(model, None)
    worker.ask(PROMPT)
    assert worker.hit(PROMPT) == 384


def test_dropout_that_is_on_is_refused(workers):
    model = build("deepseek_v3")
    model.model.layers[0].mlp.down_proj = nn.Sequential(model.model.layers[0].mlp.down_proj, nn.Dropout(0.5))
    with pytest.raises(Unsupported, match=r"call model.eval\(\) first"):
        workers(model, None)
    nn.Module.eval(model)
    worker = workers(model, None)
    worker.ask(PROMPT)
    assert worker.hit(PROMPT) == 384


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = iter(())

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_what_has_no_words_is_refused_by_its_place_and_type(workers):
    model = build("deepseek_v3")
    model.model.layers[0].mlp.act_fn = Opaque()
    with pytest.raises(Unsupported, match=r"model.layers.0.mlp.act_fn.state is a builtins.tuple_iterator"):
        workers(model, None)
