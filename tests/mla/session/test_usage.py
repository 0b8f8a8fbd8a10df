"""What a request says of itself is what its model did (``Worker.ask`` counts at the embedding)."""

from kvstore.api import MissReason, Tier
from tests.mla.session.conftest import logits, text
from tests.mla.zoo import relative


def test_hits_are_told_by_tier(model, workers, embedded):
    prompt = text(300)
    store = embedded()
    first = workers(model, store)
    cold = first.ask(prompt, new=3)
    assert cold.usage.prompt_cache_hit_tokens == 0
    assert cold.usage.hit_tokens_by_tier == {}
    assert cold.usage.miss_reason is MissReason.NEVER_SEEN
    assert cold.usage.completion_tokens == len(cold.tokens) == 3
    assert first.session.flush()

    device = first.ask(prompt, new=3)
    host = workers(model, store).ask(prompt, new=3)
    first.session.close()
    disk = workers(model, embedded()).ask(prompt, new=3)
    for answer, tier in ((device, Tier.DEVICE), (host, Tier.HOST), (disk, Tier.DISK)):
        assert answer.usage.hit_tokens_by_tier == {tier: 256}
        assert answer.usage.miss_reason is MissReason.NONE
        assert relative(logits(answer), logits(cold)) < 1e-4


def test_a_hit_may_lie_in_two_tiers(model, workers, embedded):
    prompt = text(700)
    store = embedded()
    first = workers(model, store)
    first.ask(prompt[:200])
    first.session.flush()
    other = workers(model, store)
    other.ask(prompt)
    other.session.flush()
    assert first.ask(prompt).usage.hit_tokens_by_tier == {Tier.DEVICE: 192, Tier.HOST: 448}


def test_the_session_counts_over_its_requests(model, workers, embedded):
    worker = workers(model, embedded())
    worker.ask(text(200))
    worker.ask(text(200))
    assert worker.session.flush()
    counters = worker.session.counters
    assert (counters["hit_tokens"], counters["miss_tokens"], counters["stored_blocks"]) == (192, 208, 3)


def test_without_a_store_the_pool_is_the_only_tier(model, workers):
    worker = workers(model, None)
    assert worker.hit(text(200)) == 0
    assert worker.ask(text(200)).usage.hit_tokens_by_tier == {Tier.DEVICE: 192}
    assert not worker.session.flush()


def test_the_first_row_of_several_answers_is_the_answer(model, workers, embedded):
    worker = workers(model, embedded())
    answer = worker.ask(text(150), new=4, num_beams=3, num_return_sequences=2)
    assert answer.sequences.shape == (2, 154)
    assert answer.tokens == answer.sequences[0, 150:].tolist()
    assert worker.hit(text(150) + answer.tokens) == 128
