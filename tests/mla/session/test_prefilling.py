"""Prompts prefilled ahead of time: stored as a request would have, and never computed twice."""

from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

import kvstore
from kvstore.api import Tier
from tests.mla.session.conftest import logits, text


@contextmanager
def counted(model):
    """Tokens that the model forwards meanwhile."""
    seen = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].numel())
    )
    yield seen
    hook.remove()


class Told(NamedTuple):
    tokens: int
    computed_tokens: int
    stored_tokens: int


def prefill(worker, prompt):
    """What it says, checked against what the model did."""
    with counted(worker.model) as seen:
        made = worker.session.prefill(prompt)
    assert made.computed_tokens == sum(seen)
    assert (made.unit is None) == (made.stored_tokens == 0)
    return Told(made.tokens, made.computed_tokens, made.stored_tokens)


@pytest.mark.parametrize("length", [300, 384, 1000])
def test_a_prefilled_prompt_is_hit_by_other_sessions(length, model, workers, embedded):
    store, prompt = embedded(), text(length)
    ahead = workers(model, store)
    whole = length - length % 64
    assert prefill(ahead, prompt) == Told(length, whole, whole)
    assert workers(model, store).hit(prompt) == (length - 1) // 64 * 64
    assert ahead.session.flush()
    assert ahead.session.pool.available == 8192 // 64


def test_what_is_stored_is_not_computed_again_whether_a_unit_ends_there_or_not(model, workers, embedded):
    store, prompt = embedded(), text(700)
    prefill(workers(model, store), prompt[:250])  # a unit at 192
    assert prefill(workers(model, store), prompt[:150] + text(200, seed=1)).computed_tokens == 320 - 128
    assert prefill(workers(model, store), prompt) == Told(700, 640 - 192, 640)
    assert prefill(workers(model, store), prompt) == Told(700, 0, 640)
    assert prefill(workers(model, store), prompt[:650]) == Told(650, 0, 640)
    # Stored as far as 448, but no unit ends there: one does now.
    assert prefill(workers(model, store), prompt[:450]) == Told(450, 0, 448)
    assert workers(model, store).hit([*prompt[:449], *text(100, seed=2)]) == 448


@pytest.mark.parametrize("length", [256, 300])
def test_in_exact_mode_the_bits_are_those_of_a_request(length, model, workers, embedded):
    store, prompt, settings = embedded(), text(length), {"exact": True, "prefill_chunk": 128}
    assert prefill(workers(model, store, **settings), prompt) == Told(length, 256, 256)
    longer = prompt[:256] + text(90, seed=1)
    answer = workers(model, store, **settings).ask(longer, new=3)
    assert answer.usage.hit_tokens_by_tier == {Tier.HOST: 256}
    cold = workers(model, None, **settings).ask(longer, new=3)
    assert torch.equal(logits(answer), logits(cold))


def test_nothing_is_computed_for_a_store_that_is_away(model, workers, tmp_path):
    client = kvstore.connect(f"unix://{tmp_path}/kv.sock")
    assert prefill(workers(model, client), text(200)) == Told(200, 0, 0)
    client.close()
    assert prefill(workers(model, None), text(200)) == Told(200, 0, 0)


def test_less_than_a_block_is_nothing_to_prefill(model, workers, embedded):
    assert prefill(workers(model, embedded()), text(63)) == Told(63, 0, 0)
