"""DeepSeek's caching scenarios through a real daemon, each also after it was killed and started again.

The device pool hits at any block, so each request here is made by a new session.
"""

import tempfile

import pytest

from kvstore.api import MissReason, Tier
from tests.mla.session.conftest import text
from tests.server.conftest import DaemonProcess, Fleet

A, B, C, D = text(600, 1), text(300, 2), text(300, 3), text(300, 4)


@pytest.fixture(scope="module")
def daemon_with():
    """One daemon for each interval; what the tests store in it is kept apart by a salt."""
    daemons = {}
    with tempfile.TemporaryDirectory(prefix="latentkv-") as directory:

        def daemon(interval):
            if interval not in daemons:
                place = f"{directory}/{interval}"
                sizes = ("--host-bytes", "32MiB", "--disk-bytes", "128MiB", "--interval", str(interval))
                daemons[interval] = DaemonProcess(
                    "--data", f"{place}/data", "--listen", f"unix://{place}/s", *sizes
                )
            return daemons[interval]

        yield daemon
        for each in daemons.values():
            each.close()


class Shop:
    """Asks each prompt in a new session, as another worker would, and knows when to restart the daemon."""

    def __init__(self, model, daemon, workers, salt, restarts):
        self.model, self.daemon, self.workers = model, daemon, workers
        self.salt, self.restarts = salt, restarts
        self.fleet = Fleet()
        self.client = self.fleet.connect(daemon.url)

    def ask(self, prompt, new=1):
        worker = self.workers(self.model, self.client, salt=self.salt)
        answer = worker.ask(prompt, new)
        assert worker.session.flush()
        worker.session.close()
        if self.restarts:
            self.daemon.restart()
        tiers = answer.usage.hit_tokens_by_tier
        assert set(tiers) <= {Tier.DISK if self.restarts else Tier.HOST}
        return answer

    def hit(self, prompt):
        return self.ask(prompt).usage.prompt_cache_hit_tokens


@pytest.fixture(params=[False, True], ids=["running", "restarted"])
def shop(request, model, daemon_with, workers):
    shops = []

    def make(interval):
        shops.append(Shop(model, daemon_with(interval), workers, request.node.name, request.param))
        return shops[-1]

    yield make
    for each in shops:
        each.fleet.close()


def test_the_second_turn_hits_the_end_of_the_first_answer(shop):
    shop = shop(0)
    first = shop.ask(A, new=100)
    # 700 tokens, of which the last has no latent.
    assert shop.hit(A + first.tokens + B) == 640


def test_without_intervals_a_common_prefix_is_hit_by_the_third_request(shop):
    shop = shop(0)
    assert shop.hit(A + B) == 0
    missed = shop.ask(A + C)
    assert missed.usage.prompt_cache_hit_tokens == 0
    assert missed.usage.miss_reason is MissReason.NO_UNIT
    assert shop.hit(A + D) == 576  # floor64(600)


def test_with_intervals_the_second_request_hits_the_last_mark_and_the_third_the_common_prefix(shop):
    shop = shop(256)
    assert shop.hit(A + B) == 0
    assert shop.hit(A + C) == 512
    assert shop.hit(A + D) == 576


def test_the_default_interval_is_2048_tokens(shop):
    shop = shop(2048)
    a = text(2200, 5)
    assert shop.hit(a + B) == 0
    assert shop.hit(a + C) == 2048
    assert shop.hit(a + D) == 2176


@pytest.mark.parametrize("marks", [1, 3])
def test_a_long_input_that_diverges_after_some_intervals_hits_the_last_of_them(shop, marks):
    shop = shop(256)
    shop.ask(text(900, 6))
    assert shop.hit(text(900, 6)[: 256 * marks] + text(200, 7)) == 256 * marks


def test_the_same_prompt_of_whole_blocks_uses_all_but_its_last_block(shop):
    shop = shop(0)
    prompt = text(640, 8)
    assert shop.hit(prompt) == 0
    again = shop.ask(prompt)
    assert again.usage.prompt_cache_hit_tokens == 576
    assert again.usage.miss_reason is MissReason.NONE


def test_an_answer_leaves_interval_marks_too(shop):
    shop = shop(256)
    first = shop.ask(A[:250], new=300)
    said = A[:250] + first.tokens
    assert shop.hit(said[:530] + B) == 512
