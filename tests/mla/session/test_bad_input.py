"""What cannot be served right is refused by name, and changes nothing."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from kvstore.api import MissReason
from kvstore.errors import InvalidTokens
from mla import PoolFull, Unsupported
from tests.mla.session.conftest import text
from tests.mla.zoo import build

BAD_TOKENS = {
    "negative": [3, -1],
    "beyond u32": [3, 1 << 32],
    "beyond i64": [3, 1 << 70],
    "floats": [1.0, 2.0],
    "bools": [True, False],
    "words": ["a", "b"],
    "empty": [],
    "none": None,
    "deep list": [[[1, 2]]],
    "empty tensor": torch.zeros(1, 0, dtype=torch.long),
    "fp32 tensor": torch.zeros(1, 3),
    "bf16 tensor": torch.zeros(3, dtype=torch.bfloat16),
    "scalar tensor": torch.tensor(3),
    "deep tensor": torch.zeros(1, 1, 3, dtype=torch.long),
    "negative tensor": torch.tensor([[3, -1]]),
}
BAD_OPTIONS = {
    "prompt_lookup_num_tokens": 3,
    "assistant_model": object(),
    "assistant_early_exit": 1,
    "use_mtp": True,
    "custom_generate": "somewhere/else",
    "position_ids": torch.arange(100)[None],
    "inputs": torch.ones(1, 100, dtype=torch.long),
    "inputs_embeds": torch.ones(1, 100, 64),
    "past_key_values": object(),
    "cache": object(),
    "cache_implementation": "static",
    "prefill_chunk_size": 64,
    "use_cache": False,
}


@pytest.fixture
def worker(model, workers, embedded):
    """A worker that has stored a document; it must still hit it at the end."""
    worker = workers(model, embedded())
    worker.ask(text(200))
    assert worker.session.flush()
    yield worker
    assert worker.hit(text(200)) == 192
    assert worker.session.flush()
    assert worker.session.pool.available == worker.session.pool.num_blocks


@pytest.mark.parametrize("bad", BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_token_ids_that_are_none_are_refused(bad, worker):
    with pytest.raises(InvalidTokens):
        worker.session.generate(bad)


@pytest.mark.parametrize("rows", [0, 2])
def test_a_batch_is_refused(rows, worker):
    with pytest.raises(Unsupported, match=f"a batch of {rows} prompts"):
        worker.session.generate(torch.ones(rows, 100, dtype=torch.long))


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_that_do_not_fit_a_cached_prefix_are_refused_by_name(name, worker):
    with pytest.raises(Unsupported, match=name):
        worker.session.generate(text(100), **{name: BAD_OPTIONS[name]})


@pytest.mark.parametrize("name", ["prompt_lookup_num_tokens", "assistant_early_exit", "cache_implementation"])
def test_they_are_refused_in_a_generation_config_too(name, worker, model):
    value = BAD_OPTIONS[name]
    with pytest.raises(Unsupported, match=name):
        worker.session.generate(text(100), generation_config=GenerationConfig(**{name: value}))
    setattr(model.generation_config, name, value)
    try:
        with pytest.raises(Unsupported, match=name):
            worker.session.generate(text(100))
    finally:
        setattr(model.generation_config, name, None)


def test_beams_of_a_generation_config_are_beams(worker, model):
    want = worker.ask(text(150), new=4, num_beams=3).tokens
    config = GenerationConfig(num_beams=3, max_new_tokens=4, do_sample=False)
    assert worker.session.generate(text(150), generation_config=config).tokens == want
    model.generation_config.num_beams = 3
    try:
        assert worker.ask(text(150), new=4).tokens == want
    finally:
        model.generation_config.num_beams = None


@pytest.mark.parametrize(
    "ids",
    [
        text(130),
        tuple(text(130)),
        np.array(text(130), np.uint16),
        torch.tensor(text(130)),
        torch.tensor([text(130)]),
    ],
    ids=["list", "tuple", "array", "flat tensor", "row"],
)
def test_token_ids_may_come_in_any_flat_form(ids, worker):
    usage = worker.session.generate(ids, max_new_tokens=1).usage
    assert (usage.prompt_tokens, usage.prompt_cache_hit_tokens) == (130, 128)


def test_a_prompt_shorter_than_a_block_works_and_caches_nothing(model, workers, embedded):
    store = embedded()
    worker = workers(model, store)
    for _ in range(2):
        answer = worker.ask(text(63))
        assert answer.usage.prompt_cache_hit_tokens == 0
        assert answer.usage.miss_reason is MissReason.SHORTER_THAN_BLOCK
    assert worker.session.flush()
    assert store.status().disk.blocks == store.status().units == 0


def test_its_answer_may_reach_a_block(model, workers, embedded):
    worker = workers(model, embedded())
    first = worker.ask(text(60), new=30)
    assert worker.session.flush()
    assert workers(model, worker.session._store).hit(text(60) + first.tokens + text(9)) == 64


def test_a_prompt_that_does_not_fit_into_the_pool_says_so(model, workers, embedded):
    worker = workers(model, embedded(), pool_tokens=256)
    worker.ask(text(100))
    assert worker.session.flush()
    with pytest.raises(PoolFull, match="make the pool larger"):
        worker.session.generate(text(400), max_new_tokens=1)
    worker.session.flush()
    assert worker.session.pool.available == worker.session.pool.num_blocks
    assert worker.hit(text(100)) == 64


def test_a_prompt_whose_cached_prefix_fills_the_pool_says_so(model, workers, embedded):
    store = embedded()
    big = workers(model, store)
    big.ask(text(600))
    assert big.session.flush()
    worker = workers(model, store, pool_tokens=256)
    worker.ask(text(100, 1))
    for _ in range(3):
        with pytest.raises(PoolFull):
            worker.session.generate(text(600), max_new_tokens=1)
    worker.session.flush()  # what it had stored of these may have been given up for room
    assert worker.session.pool.available == worker.session.pool.num_blocks


def test_an_answer_that_fails_midway_leaves_nothing_held(worker):
    def stop(ids, scores):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        worker.session.generate(text(300, 1), max_new_tokens=5, stopping_criteria=[stop])
    # The chunks that were finished are of use all the same.
    assert worker.hit(text(300, 1)) == 256


def test_a_model_past_its_longrope_length_is_refused(workers, embedded):
    model = build("minicpm3_longrope")
    worker = workers(model, embedded())
    with pytest.raises(Unsupported, match="longrope"):
        worker.session.generate(text(1100))


def test_a_closed_session_answers_without_storing(model, workers, embedded):
    store = embedded()
    worker = workers(model, store)
    worker.session.close()
    worker.session.close()
    assert [worker.hit(text(200)), worker.hit(text(200))] == [0, 192]
    assert store.status().disk.blocks == 0
