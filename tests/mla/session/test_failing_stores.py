"""Whatever happens to the store, the answer is right: it costs a miss and a counter."""

import signal
import tempfile

import pytest

import kvstore
from kvstore.api import KVStore, MissReason
from kvstore.errors import KVStoreError
from mla.prefix import PrefixLoader
from tests.mla.session.conftest import logits, text
from tests.mla.zoo import relative
from tests.server.conftest import start

VERBS = ("open_namespace", "match", "load", "reserve", "commit", "durable", "release")
PROMPT = text(300)


class Around:
    """A real store, with something happening before the first call of a verb."""

    def __init__(self, store: KVStore, **before):
        self._store, self._before = store, before

    def __getattr__(self, name):
        if name in self._before:
            self._before.pop(name)()
        return getattr(self._store, name)


@pytest.fixture
def cold(model, workers):
    """The answer of a model that knows no store."""
    return workers(model, None).ask(PROMPT, new=4)


def same(answer, cold):
    """To rounding, for a hit may lie at any block."""
    assert answer.tokens == cold.tokens
    assert relative(logits(answer), logits(cold)) < 1e-4


@pytest.fixture
def stored(model, workers, embedded):
    """An embedded store that has PROMPT."""
    store = embedded()
    worker = workers(model, store)
    worker.ask(PROMPT)
    assert worker.session.flush()
    return store


def failing(error):
    def fail():
        raise error

    return fail


ERRORS = [KVStoreError("no"), RuntimeError("no"), OSError(5, "no"), KeyError("no")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("verb", ["open_namespace", "match", "load"])
def test_a_verb_that_raises_before_the_answer_is_a_miss(verb, error, model, workers, stored, cold):
    worker = workers(model, Around(stored, **{verb: failing(error)}))
    answer = worker.ask(PROMPT, new=4)
    same(answer, cold)
    assert answer.usage.prompt_cache_hit_tokens == 0
    assert worker.session.counters[f"{verb}_failed"] == 1
    assert (answer.usage.miss_reason is MissReason.UNAVAILABLE) is (verb != "load")
    assert worker.session.flush() is (verb == "load")
    assert worker.session.pool.available == worker.session.pool.num_blocks


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("verb", ["reserve", "commit", "durable", "release"])
def test_a_verb_that_raises_behind_the_answer_is_counted(verb, error, model, workers, embedded, cold):
    store = embedded()
    worker = workers(model, Around(store, **{verb: failing(error)}))
    same(worker.ask(PROMPT, new=4), cold)
    assert worker.session.flush() is (verb == "release")
    counted = {"reserve": "store", "commit": "store"}.get(verb, verb)
    assert worker.session.counters[f"{counted}_failed_{type(error).__name__}"] == 1
    assert worker.session.counters["dropped_blocks"] == (4 if counted == "store" else 0)
    assert worker.session.pool.available == worker.session.pool.num_blocks
    # The next request is served and stored as if nothing had been.
    assert workers(model, store).ask(text(200, 1)).usage.prompt_tokens == 200


def test_a_store_that_was_closed_under_the_session_is_a_miss(model, workers, stored, cold):
    worker = workers(model, stored)
    assert worker.hit(PROMPT) == 256
    stored.close()
    worker.session.pool.clear()
    same(worker.ask(PROMPT, new=4), cold)
    assert not worker.session.flush()


def test_a_client_that_is_connected_to_nothing_is_a_miss(model, workers, tmp_path, cold):
    with_nothing = kvstore.connect(f"unix://{tmp_path}/nobody", timeout=5)
    worker = workers(model, with_nothing)
    same(worker.ask(PROMPT, new=4), cold)
    assert worker.session.counters["store_unavailable"] == 1
    assert not worker.session.flush()
    # The pool serves on, under names of its own.
    assert worker.hit(PROMPT) == 256
    with_nothing.close()


@pytest.fixture
def daemon(fleet, flags):
    # An arena that a load of 40 blocks passes through in several batches.
    return start(fleet, "mapped", flags, host_bytes="1MiB", interval=0)


LONG = text(40 * 64 + 5)


@pytest.fixture
def client(model, workers, daemon, fleet):
    """A client of a daemon that has LONG on disk."""
    client = fleet.connect(daemon.url)
    worker = workers(model, client)
    worker.ask(LONG)
    assert worker.session.flush()
    worker.session.close()
    return client


@pytest.fixture
def long_cold(model, workers):
    return workers(model, None).ask(LONG, new=2)


@pytest.mark.parametrize("verb", ["open_namespace", "match", "load", "reserve", "commit"])
def test_a_daemon_killed_before_any_verb_is_a_miss(verb, model, workers, daemon, client, long_cold):
    worker = workers(model, Around(client, **{verb: daemon.kill}))
    answer = worker.ask(LONG, new=2)
    same(answer, long_cold)
    hit = 2560 if verb in ("reserve", "commit") else 0
    assert answer.usage.prompt_cache_hit_tokens == hit
    assert not worker.session.flush()
    assert worker.session.pool.available == worker.session.pool.num_blocks
    # Back again, it is of use again.
    daemon.restart()
    worker.session.pool.clear()
    assert worker.hit(LONG) == 2560
    assert worker.session.flush()


class Interrupted(PrefixLoader):
    """Loads, and has something happen once the first batch is in the pool."""

    def __init__(self, loader, event):
        vars(self).update(vars(loader))
        self._event = event

    def _fill(self, fresh, load, first):
        def batches():
            for number, batch in enumerate(load):
                yield batch
                if number == 0:
                    self._event()

        return super()._fill(fresh, batches(), first)


def test_a_daemon_killed_in_the_middle_of_a_load_gives_what_came_before(
    model, workers, daemon, client, long_cold
):
    worker = workers(model, client)
    worker.session._loader = Interrupted(worker.session._loader, daemon.kill)
    answer = worker.ask(LONG, new=2)
    same(answer, long_cold)
    assert 0 < answer.usage.prompt_cache_hit_tokens < 2560
    assert worker.session.counters["short_loads"] == 1
    assert not worker.session.flush()
    assert worker.session.pool.available == worker.session.pool.num_blocks


def test_an_interrupt_in_the_middle_of_a_load_leaves_nothing_held(model, workers, client):
    worker = workers(model, client)
    loader = worker.session._loader
    worker.session._loader = Interrupted(loader, failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        worker.ask(LONG)
    assert worker.session.pool.available == worker.session.pool.num_blocks
    assert client.status().leases == 0
    worker.session._loader = loader
    assert worker.hit(LONG) == 2560


@pytest.mark.parametrize("verb", ["match", "load"])
def test_a_daemon_that_stands_still_is_a_miss(verb, model, workers, daemon, client, fleet, long_cold):
    impatient = fleet.connect(daemon.url, timeout=0.3)
    stop = lambda: daemon.process.send_signal(signal.SIGSTOP)  # noqa: E731
    worker = workers(model, Around(impatient, **{verb: stop}), load_timeout=0.3)
    same(worker.ask(LONG, new=2), long_cold)
    daemon.process.send_signal(signal.SIGCONT)
    assert workers(model, client).hit(LONG) == 2560


def test_a_daemon_of_other_data_is_met_with_the_second_request(model, workers, daemon, client, fleet, flags):
    worker = workers(model, client)
    assert worker.hit(LONG) == 2560
    daemon.kill()
    with tempfile.TemporaryDirectory() as elsewhere:
        fleet.daemon(*flags(data=elsewhere))
        worker.session.pool.clear()
        assert [worker.hit(LONG), worker.hit(LONG)] == [0, 0]
        assert not worker.session.flush()  # of the first
        assert worker.hit(LONG) == 2560
        assert worker.session.flush()
        assert workers(model, client).hit(LONG) == 2560
        worker.session.close()


def test_a_load_in_the_wrong_order_is_a_miss(model, workers, stored, cold):
    class Shuffled(Around):
        def load(self, *args, **kwargs):
            load = self._store.load(*args, **kwargs)

            class Reversed:
                def __enter__(self):
                    load.__enter__()
                    return self

                def __exit__(self, *error):
                    load.__exit__(*error)

                def __iter__(self):
                    return (list(reversed(batch)) for batch in load)

            return Reversed()

    worker = workers(model, Shuffled(stored))
    answer = worker.ask(PROMPT, new=4)
    same(answer, cold)
    assert answer.usage.prompt_cache_hit_tokens == 0
