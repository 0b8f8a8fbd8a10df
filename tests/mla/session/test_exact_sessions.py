"""Exact mode: the same bits with and without a hit, through DISK and a daemon that was killed."""

import pytest
import torch

from kvstore.api import Tier
from mla.session import Session
from tests.mla.session.conftest import logits, text
from tests.mla.zoo import build
from tests.server.conftest import start

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module", params=["dense", "moe"])
def models(request):
    """One model in both dtypes."""
    name = {"dense": "youtu", "moe": "deepseek_v3"}[request.param]
    return {dtype: build(name).to(torch_dtype) for dtype, torch_dtype in DTYPES.items()}


@pytest.mark.parametrize("chunk", [64, 128])
def test_logits_are_the_same_bits_for_hits_at_every_multiple_of_the_chunk(
    models, chunk, workers, fleet, flags
):
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    prompt = text(4 * chunk + 37)
    hits = range(chunk, len(prompt), chunk)

    def worker(dtype, store, hit):
        # A store of its own for each hit: what the others left must not be hit instead.
        return workers(models[dtype], store, exact=True, prefill_chunk=chunk, salt=f"{hit}")

    for dtype in DTYPES:
        for hit in hits:
            one = worker(dtype, client, hit)
            one.ask(prompt[:hit])
            assert one.session.flush()
    daemon.restart()
    for dtype in DTYPES:
        cold = worker(dtype, None, 0).ask(prompt, new=3)
        for hit in hits:
            answer = worker(dtype, client, hit).ask(prompt, new=3)
            assert answer.usage.hit_tokens_by_tier == {Tier.DISK: hit}
            assert torch.equal(logits(answer), logits(cold))
            assert answer.tokens == cold.tokens


@pytest.mark.parametrize("length", [384, 385, 447])
def test_a_prompt_meets_its_own_bits_again_in_every_tier(models, length, workers, embedded):
    prompt = text(length)
    settings = {"exact": True, "prefill_chunk": 128}
    usable = (length - 1) // 128 * 128
    for model in models.values():
        cold = workers(model, None, **settings).ask(prompt, new=3)
        store = embedded()
        first = workers(model, store, **settings)
        answers = [first.ask(prompt, new=3), first.ask(prompt, new=3)]
        assert first.session.flush()
        answers.append(workers(model, store, **settings).ask(prompt, new=3))
        first.session.close()
        answers.append(workers(model, embedded(), **settings).ask(prompt, new=3))
        tiers = [{}, {Tier.DEVICE: usable}, {Tier.HOST: usable}, {Tier.DISK: usable}]
        assert [answer.usage.hit_tokens_by_tier for answer in answers] == tiers
        assert all(torch.equal(logits(answer), logits(cold)) for answer in answers)


@pytest.mark.parametrize("length", [256, 320, 383])
def test_only_whole_chunks_are_stored_and_nothing_that_decoding_made(model, length, workers, embedded):
    store = embedded()
    worker = workers(model, store, exact=True)
    prompt = text(length)
    answer = worker.ask(prompt, new=200)
    assert worker.session.flush()
    assert store.status().disk.blocks == 256 // 64
    assert store.status().units == 1
    # A second turn computes the answer anew, and leaves it behind.
    turn = prompt + answer.tokens
    assert worker.hit(turn) == 256
    assert worker.session.flush()
    assert workers(model, store, exact=True).hit([*turn[:-7], 1]) == (length + 193) // 128 * 128


def test_a_prompt_shorter_than_a_chunk_is_not_stored(model, workers, embedded):
    store = embedded()
    worker = workers(model, store, exact=True)
    assert [worker.hit(text(127)), worker.hit(text(127))] == [0, 0]
    assert worker.session.flush()
    assert store.status().disk.blocks == 0


def test_a_hit_is_rounded_down_to_the_chunk(model, workers, embedded):
    store = embedded()
    first = workers(model, store, exact=True)
    first.ask(text(640))
    assert first.session.flush()
    # The common prefix of 448 tokens becomes a unit for the third request.
    other = workers(model, store, exact=True)
    other.ask(text(450) + text(300, 1))
    assert other.session.flush()
    third = workers(model, store, exact=True).ask(text(450) + text(300, 2))
    assert third.usage.prompt_cache_hit_tokens == 384


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_sessions_of_other_numerics_never_meet(model, workers, embedded, threads):
    store, prompt = embedded(), text(600)
    kinds = {
        "chunk 128": {"exact": True, "prefill_chunk": 128},
        "chunk 64": {"exact": True, "prefill_chunk": 64},
        "not exact": {"exact": False},
        "two threads": {"exact": True, "prefill_chunk": 128},
    }
    for rounds in (False, True):
        for kind, settings in kinds.items():
            threads(2 if kind == "two threads" else 1)
            worker = workers(model, store, **settings)
            assert (worker.hit(prompt) > 0) is rounds, kind
            assert worker.session.flush()


def set_precision(on):
    torch.set_float32_matmul_precision("high" if on else "highest")


def set_deterministic(on):
    torch.use_deterministic_algorithms(on)


@pytest.mark.parametrize(
    "change", [lambda on: torch.set_num_threads(1 + on), set_precision, set_deterministic]
)
def test_a_setting_changed_between_two_requests_is_noticed(model, change, workers, embedded, threads):
    worker = workers(model, embedded(), exact=True)
    try:
        assert worker.hit(text(300)) == 0
        change(True)
        assert worker.hit(text(300)) == 0
        assert worker.hit(text(300)) == 256
    finally:
        change(False)
    assert worker.hit(text(300)) > 0


def test_autocast_is_another_numerics(model, workers, embedded):
    worker = workers(model, embedded(), exact=True)
    worker.ask(text(300))
    with torch.autocast("cpu"):
        assert worker.hit(text(300)) == 0


def test_several_rows_are_refused_in_exact_mode(model, workers, embedded):
    worker = workers(model, embedded(), exact=True)
    for option in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        with pytest.raises(ValueError, match="exact mode"):
            worker.session.generate(text(10), **option)
    model.generation_config.num_beams = 2
    try:
        with pytest.raises(ValueError, match="exact mode"):
            worker.session.generate(text(10))
    finally:
        model.generation_config.num_beams = None


def test_a_chunk_must_be_whole_blocks(model):
    for chunk in (0, 32, 100, -64):
        with pytest.raises(ValueError, match=f"prefill_chunk={chunk}"):
            Session(model, None, prefill_chunk=chunk)
