"""Each option of ``generate`` in a stored session: with a hit the unattached model's answer, or refused."""

import copy
import threading

import pytest
import torch
from transformers import CompileConfig, GenerationConfig

import mla
from kvstore.errors import InvalidArgument
from mla import PoolFull, Unsupported
from mla.options import IDLE, REFUSED, SERVED
from tests.mla import decoders
from tests.mla.decoders import PROMPT, Collecting
from tests.mla.session.conftest import text
from tests.mla.zoo import build

IDS = text(PROMPT, 2)
# A value for each that is refused.
VALUES = {
    "speculation_type": "dflash",
    "is_assistant": True,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "constraints": [object()],
    "force_words_ids": [[3]],
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "token_healing": True,
    "cache_params": object(),
    "cache_config": {"backend": "quanto"},
    "max_cache_len": 400,
    "continuous_batching_config": object(),
    "output_attentions": True,
    "output_hidden_states": True,
    "synced_gpus": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_model": object(),
    "assistant_early_exit": 1,
    "use_mtp": True,
    "custom_generate": decoders.own_loop,
    "position_ids": torch.arange(PROMPT)[None],
    "inputs": torch.tensor([IDS]),
    "inputs_embeds": torch.ones(1, PROMPT, 64),
    "past_key_values": object(),
    "cache": object(),
    "cache_implementation": "static",
    "prefill_chunk_size": 64,
}


@pytest.fixture(scope="module")
def stock():
    return build("deepseek_v3")


@pytest.fixture
def worker(model, workers, embedded):
    worker = workers(model, embedded())
    worker.ask(IDS)
    assert worker.session.flush()
    return worker


@pytest.mark.parametrize("name", decoders.SERVED)
def test_options_that_are_served_answer_as_the_unattached_model(name, worker, stock):
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ones = torch.ones(1, PROMPT, dtype=torch.long)  # or transformers takes a token 0 for padding
    mine, theirs = decoders.SERVED[name](), decoders.SERVED[name]()
    torch.manual_seed(1)
    got = worker.session.generate(IDS, **options | mine)
    torch.manual_seed(1)
    want = stock.generate(torch.tensor([IDS]), attention_mask=ones, **options | theirs)
    assert got.usage.prompt_cache_hit_tokens == 128
    assert torch.equal(got.sequences, want)
    if "streamer" in mine:
        assert mine["streamer"].seen == theirs["streamer"].seen != []


def test_scores_and_logits_come_when_asked_for(worker, stock):
    options = {"max_new_tokens": 3, "do_sample": False, "repetition_penalty": 2.0, "pad_token_id": 0}
    options |= {"output_scores": True, "output_logits": True}
    got = worker.session.generate(IDS, **options)
    want = stock.generate(torch.tensor([IDS]), **options, return_dict_in_generate=True)
    for mine, theirs in ((got.scores, want.scores), (got.logits, want.logits)):
        assert torch.allclose(torch.cat(mine), torch.cat(theirs), atol=1e-3)
    assert worker.session.generate(IDS, max_new_tokens=1).scores is None


def test_there_is_a_value_for_every_option_that_is_refused():
    assert set(VALUES) == set(REFUSED)


@pytest.mark.parametrize("name", VALUES)
def test_options_that_are_refused_are_named_before_anything_is_computed(name, worker):
    counters = copy.copy(worker.session.counters)
    with pytest.raises(Unsupported, match=f"^{name} in a stored session"):
        worker.session.generate(IDS, **{name: VALUES[name]})
    assert worker.session.counters == counters


def test_what_nobody_knows_is_refused_by_name(worker):
    with pytest.raises(Unsupported, match="max_new_token in a stored session: not known"):
        worker.session.generate(IDS, max_new_token=3)
    with pytest.raises(Unsupported, match="output_router_logits in a stored session"):
        worker.session.generate(IDS, output_router_logits=True)


def test_a_setting_of_a_later_transformers_is_refused_and_other_entries_of_a_file_are_not(
    worker, monkeypatch
):
    config = GenerationConfig(max_new_tokens=2, chat_format="chatml")
    want = worker.session.generate(IDS, max_new_tokens=2).tokens
    assert worker.session.generate(IDS, generation_config=config).tokens == want
    monkeypatch.setattr("mla.decoding.SERVED", SERVED - {"top_h"})
    with pytest.raises(Unsupported, match="top_h in a stored session: not known"):
        worker.session.generate(IDS, generation_config=GenerationConfig(top_h=0.4, do_sample=True))
    assert worker.session.generate(IDS, generation_config=config).tokens == want


def test_idle_options_change_nothing(worker):
    values = dict.fromkeys(IDLE - {"transformers_version", "low_memory"}, 3)
    want = worker.session.generate(IDS, max_new_tokens=3).tokens
    values |= {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.5}
    values |= {"assistant_ensemble_weight": 0.5}
    assert worker.session.generate(IDS, max_new_tokens=3, low_memory=True, **values).tokens == want


BAD_VALUES = [
    {"max_new_tokens": 0},
    {"max_new_tokens": -3},
    {"max_new_tokens": "three"},
    {"max_length": 0},
    {"max_length": PROMPT},
    {"num_beams": 0},
    {"num_beams": "two"},
    {"num_return_sequences": 2, "do_sample": False},
    {"num_beams": 2, "num_return_sequences": 3},
    {"num_beams": 2, "streamer": Collecting()},
    {"stop_strings": "a"},
    {"generation_config": {"max_new_tokens": 3}},
    {"compile_config": CompileConfig(), "max_new_tokens": 0},
]


@pytest.mark.parametrize("options", BAD_VALUES, ids=" ".join)
def test_values_that_mean_nothing_are_refused_before_anything_is_computed(options, worker):
    counters = copy.copy(worker.session.counters)
    with pytest.raises(InvalidArgument):
        worker.session.generate(IDS, **options)
    assert worker.session.counters == counters


def fits_exactly(session, prompt, rows, new):
    """The most blocks that such a call references at a time."""
    most = 0

    def look(ids, scores):
        nonlocal most
        most = max(most, session.pool.num_blocks - session.pool.available)
        return scores.roll(int(ids[:, -1].sum()), dims=-1)

    options = {"num_beams": rows} if rows > 1 else {}
    answer = session.generate(prompt, max_new_tokens=new, logits_processor=[look], **options)
    assert len(answer.tokens) == new
    return most


@pytest.mark.parametrize(("prompt", "new", "rows"), [(120, 9, 1), (128, 65, 1), (100, 90, 2), (130, 130, 4)])
def test_a_pool_that_just_holds_prompt_and_answers_is_enough(prompt, new, rows, model, workers):
    from mla.decoding import Decoding

    need = Decoding(rows, new).blocks(prompt, 64)
    worker = workers(model, None, pool_tokens=need * 64)
    assert fits_exactly(worker.session, text(prompt), rows, new) <= need
    smaller = workers(model, None, pool_tokens=(need - 1) * 64)
    with pytest.raises(
        PoolFull, match=rf"{prompt} tokens and {new} new ones.* holds {(need - 1) * 64}: make"
    ):
        smaller.session.generate(
            text(prompt), max_new_tokens=new, **({"num_beams": rows} if rows > 1 else {})
        )


def test_what_does_not_fit_fails_before_it_is_computed(model, workers, embedded):
    worker = workers(model, embedded(), pool_tokens=256)
    seen = []
    hook = model.get_input_embeddings().register_forward_hook(lambda *args: seen.append(args))
    with pytest.raises(PoolFull, match="a prompt of 400 tokens and 1 new ones need 448 tokens of the pool"):
        worker.session.generate(text(400), max_new_tokens=1)
    with pytest.raises(PoolFull, match="100 tokens and 1000 new ones"):
        worker.session.generate(text(100), max_new_tokens=1000)
    with pytest.raises(PoolFull, match="384 tokens need 384 tokens of the pool, which holds 256"):
        worker.session.prefill(text(400))
    hook.remove()
    assert seen == []
    assert worker.session.flush()
    assert worker.session.pool.available == 4


def test_more_tokens_than_positions_are_refused(workers):
    worker = workers(build("deepseek_v3", max_position_embeddings=200), None)
    for prompt, new in ((201, 1), (150, 52)):
        with pytest.raises(
            Unsupported, match=f"{prompt} tokens and {new} new ones, but the model has 200 pos"
        ):
            worker.session.generate(text(prompt), max_new_tokens=new)
    assert len(worker.ask(text(200)).tokens) == 1
    assert len(worker.ask(text(150), new=51).tokens) == 51
    assert len(worker.session.generate(text(195)).tokens) == 5  # nothing said: as many as there is room for
    with pytest.raises(InvalidArgument, match="no room after a prompt of 200 tokens"):
        worker.session.generate(text(200))


def test_a_session_of_a_model_that_was_changed_refuses(workers, embedded):
    model = build("deepseek_v3")
    worker = workers(model, embedded())
    want = worker.ask(IDS).tokens
    model.set_attn_implementation("sdpa")
    with pytest.raises(Unsupported, match="switched to 'sdpa'"):
        worker.session.generate(IDS)
    with pytest.raises(Unsupported, match="switched to 'sdpa'"):
        worker.session.prefill(IDS)
    mla.detach(model)
    with pytest.raises(Unsupported, match="is not attached"):
        worker.session.generate(IDS)
    mla.attach(model)
    assert worker.ask(IDS).tokens == want
    model.train()
    with pytest.raises(Unsupported, match=r"model\.eval"):
        worker.session.generate(IDS)
    model.eval()
    model.half()
    with pytest.raises(Unsupported, match=r"float16 on cpu now, the session's pool torch\.float32"):
        worker.session.generate(IDS)
    model.float()


def test_autocast_over_a_session_is_refused_unless_it_is_in_the_name(model, workers, embedded):
    store = embedded()
    plain, exact = workers(model, store), workers(model, store, exact=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(Unsupported, match=r"autocast to torch\.bfloat16"):
            plain.session.generate(IDS)
        assert exact.session.generate(IDS, max_new_tokens=1).usage.prompt_cache_hit_tokens == 0
    assert plain.hit(IDS) == 0


def test_after_a_session_was_closed_the_model_still_refuses_what_it_cannot_answer(workers, embedded, stock):
    model = build("deepseek_v3")
    workers(model, embedded()).session.close()
    ids = torch.tensor([IDS])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))
    with pytest.raises(Unsupported):
        model.generate(ids, cache_implementation="static", **options)
    with pytest.raises(Unsupported, match="no_grad"):
        model(ids)


def test_threads_of_one_session_take_turns_and_all_get_their_answer(worker):
    want = {seed: worker.ask(text(200, seed), new=4).tokens for seed in range(4)}
    got, start = {}, threading.Barrier(4)

    def ask(seed):
        start.wait(30)
        got[seed] = worker.session.generate(text(200, seed), max_new_tokens=4, do_sample=False).tokens

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == want


def test_a_processor_may_ask_the_same_session_in_between(worker):
    answers = []

    def asks(ids, scores):
        answers.append(worker.session.generate(IDS[:100], max_new_tokens=1).tokens)
        return scores

    want = worker.session.generate(IDS, max_new_tokens=2).tokens
    assert worker.session.generate(IDS, max_new_tokens=2, logits_processor=[asks]).tokens == want
    assert len(answers) == 2
