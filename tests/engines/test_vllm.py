"""vLLM's own scheduler with our connector, against a real daemon."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not in this environment: make test-engines")

from vllm.distributed.kv_events import BlockStored
from vllm.v1.request import RequestStatus

from kvstore.errors import InvalidArgument
from kvstore.layout import BLOCK_TOKENS
from mla.errors import Unsupported
from tests.engines.checkpoint import checkpoint, damage
from tests.engines.vllm_engine import Engine, Truth
from tests.server.conftest import DaemonProcess, Fleet


@pytest.fixture(scope="module", autouse=True)
def _groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's process groups, of one rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    path = tmp_path_factory.mktemp("groups") / "store"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{path}", 0, "gloo")
        parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@dataclass
class Site:
    """A daemon, and servers of one model over it, each with an empty cache of its own."""

    daemon: DaemonProcess
    data: Path
    model: Path
    block_size: int
    engines: list[Engine] = field(default_factory=list)

    def start(self, **changes: object) -> Engine:
        chosen = {"num_blocks": 9600 // self.block_size, "block_size": self.block_size, "model": self.model}
        engine = Engine(self.daemon.url, **chosen | changes)  # type: ignore[arg-type]
        self.engines.append(engine)
        return engine

    def restart(self) -> None:
        """From now on the daemon has on disk what it had, and nothing in its arena."""
        assert self.daemon.term() == 0
        self.daemon.start()

    def stop(self) -> None:
        self.daemon.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.daemon.process.send_signal(signal.SIGCONT)


@pytest.fixture(params=[16, 64])
def site(
    fleet: Fleet, flags: Callable[..., list[str]], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Site]:
    chosen = flags()
    data = Path(chosen[chosen.index("--data") + 1])
    site = Site(fleet.daemon(*chosen), data, checkpoint(tmp_path / "model"), request.param)
    yield site
    if site.daemon.process.poll() is None:
        site.go_on()
    for engine in site.engines:
        engine.close()


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=tokens)


TRUTH = Truth()


def test_another_server_loads_what_one_has_computed(site: Site) -> None:
    first, second = site.start(), site.start()
    text = prompt(700)
    assert first.serve("a", text) == TRUTH.answer(text, 3)
    assert first.loaded == {}
    assert second.serve("b", text) == TRUTH.answer(text, 3)
    assert second.loaded == {"b": 640}
    assert first.used_blocks == second.used_blocks == 0


def test_it_loads_after_engine_and_daemon_were_restarted(site: Site) -> None:
    text = prompt(700)
    site.start().serve("a", text)
    site.restart()
    engine = site.start()
    assert engine.serve("b", text) == TRUTH.answer(text, 3)
    assert engine.loaded == {"b": 640}


def test_a_prompt_that_is_stored_whole_is_loaded_whole(site: Site) -> None:
    text = prompt(640)
    site.start().serve("a", text)
    engine = site.start()
    assert engine.serve("b", text) == TRUTH.answer(text, 3)
    assert engine.loaded == {"b": 640}


def test_the_second_turn_loads_the_first_ones_answer(site: Site) -> None:
    text = prompt(300)
    answer = site.start().serve("a", text, 150)
    assert answer == TRUTH.answer(text, 150)
    turn = text + answer + prompt(50, seed=1)
    engine = site.start()
    assert engine.serve("b", turn) == TRUTH.answer(turn, 3)
    assert engine.loaded == {"b": 448}  # floor64(300 + 150 - 1)


def test_other_requests_go_on_while_one_loads(site: Site) -> None:
    text, other = prompt(700), prompt(90, seed=1)
    site.start().serve("a", text)
    engine = site.start()
    engine.add("other", other, 40)
    engine.run_until(lambda: len(engine.answers["other"]) == 1)
    request = engine.add("b", text)
    engine.on_load = site.stop
    engine.run_until(lambda: request.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
    engine.run_until(lambda: "other" in engine.reasons)  # the daemon does not answer meanwhile
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    site.go_on()
    engine.run()
    assert engine.answers == {"other": TRUTH.answer(other, 40), "b": TRUTH.answer(text, 3)}
    assert engine.loaded == {"b": 640}


@pytest.mark.parametrize("tokens", [700, 640])  # a hit of some of the prompt, and of all of it
def test_a_corrupt_block_is_computed_again_and_healed(site: Site, tokens: int) -> None:
    text = prompt(tokens)
    site.start().serve("a", text)
    assert site.daemon.term() == 0
    damaged = TRUTH.entries(text)[:, 4 * BLOCK_TOKENS : 5 * BLOCK_TOKENS].contiguous().numpy().tobytes()
    damage(site.data, damaged)
    site.daemon.start()
    engine = site.start()
    assert engine.serve("b", text) == TRUTH.answer(text, 3)
    assert engine.used_blocks == 0
    assert engine.worker.connector._worker.counters()["short_loads"] == 1
    healed = site.start()
    assert healed.serve("c", text) == TRUTH.answer(text, 3)
    assert healed.loaded == {"c": 640}
    assert healed.worker.connector._worker.counters()["short_loads"] == 0


def test_preempted_requests_come_back_with_the_right_answer(site: Site) -> None:
    # Room for one and a half of the requests once they have grown.
    engine = site.start(num_blocks=1 + 1152 // site.block_size)
    texts = {name: prompt(500, seed) for seed, name in enumerate("ab")}
    requests = [engine.add(name, text, 200) for name, text in texts.items()]
    engine.run()
    assert sum(request.num_preemptions for request in requests) > 0
    assert engine.answers == {name: TRUTH.answer(text, 200) for name, text in texts.items()}
    assert engine.used_blocks == 0
    fresh = site.start()
    for name, text in texts.items():  # nothing wrong was stored meanwhile
        turn = text + engine.answers[name]
        assert fresh.serve(name, turn) == TRUTH.answer(turn, 3)
    assert set(fresh.loaded) == {"a", "b"}


def test_a_request_that_is_aborted_in_mid_load_gives_its_blocks_back(site: Site) -> None:
    text = prompt(700)
    site.start().serve("a", text)
    engine = site.start()
    request = engine.add("b", text)
    engine.on_load = site.stop
    engine.run_until(lambda: request.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
    engine.abort("b")
    assert engine.used_blocks > 0  # the load may still write to them
    site.go_on()
    engine.on_load = lambda: None
    engine.run()
    assert engine.used_blocks == 0
    assert engine.serve("c", text) == TRUTH.answer(text, 3)


def test_two_requests_with_one_prefix_load_it_both_right(site: Site) -> None:
    text = prompt(640)
    site.start().serve("a", text)
    tails = {name: text + prompt(70, seed) for seed, name in enumerate("bc", 1)}
    engine = site.start()
    for name, tail in tails.items():
        engine.add(name, tail)
    engine.run()
    assert engine.answers == {name: TRUTH.answer(tail, 3) for name, tail in tails.items()}
    assert engine.loaded["b"] == 640
    assert engine.used_blocks == 0


def test_a_prefix_that_two_requests_share_becomes_a_unit(site: Site) -> None:
    system = prompt(320)
    first = site.start()
    for seed in (1, 2):
        first.serve(f"a{seed}", system + prompt(100, seed))
    engine = site.start()
    third = system + prompt(100, 3)
    assert engine.serve("b", third) == TRUTH.answer(third, 3)
    assert engine.loaded == {"b": 320}


def test_a_load_begins_behind_what_the_engine_has_itself(site: Site) -> None:
    text = prompt(700)
    site.start().serve("a", text)
    engine = site.start()
    engine.serve("short", text[:105])  # 96 or 64 tokens of it stay in the engine's own cache
    own = 105 // site.block_size * site.block_size
    assert engine.serve("b", text) == TRUTH.answer(text, 3)
    assert engine.loaded["b"] == 640 - own


def test_an_adapter_is_named_by_its_files_as_they_were_when_vllm_loaded_them(tmp_path: Path) -> None:
    from mla.adapters.vllm_namespace import AdapterNames

    names, path = AdapterNames(), tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(b"one")
    (path / "adapter_config.json").write_text('{"lora_alpha": 8}')
    first = names("a", str(path), 1)
    assert names("a", str(path), 1) == first
    (path / "adapter_config.json").write_text('{"lora_alpha": 9}')
    with pytest.raises(Unsupported, match="unload it and load it again"):
        names("a", str(path), 1)
    assert names("a", str(path), 2) != first  # loaded again
    assert AdapterNames()("a", str(path), 1) != first
    assert names("", "", 0) == ""
    with pytest.raises(Unsupported, match="no directory"):
        names("b", "org/name", 3)


@pytest.mark.parametrize("difference", ["salt", "weights", "tenant"])
def test_servers_and_requests_that_differ_never_share(site: Site, tmp_path: Path, difference: str) -> None:
    text = prompt(700)
    site.start().serve("a", text, cache_salt="one")
    changes: dict[str, object] = {
        "salt": {},
        "weights": {"model": checkpoint(tmp_path / "other" / "model", b"other weights")},
        "tenant": {"extra": {"tenant": "other"}},
    }[difference]
    engine = site.start(**changes)
    salt = "two" if difference == "salt" else "one"
    assert engine.serve("b", text, cache_salt=salt) == TRUTH.answer(text, 3)
    assert engine.loaded == {}
    same = site.start()
    same.serve("c", text, cache_salt="one")
    assert same.loaded == {"c": 640}


def test_a_reset_of_the_cache_forgets_what_was_before_and_begins_anew(site: Site) -> None:
    text, other = prompt(700), prompt(300, 1)
    engine = site.start()
    engine.serve("a", text)
    running = engine.add("running", other, 100)
    engine.run_until(lambda: len(engine.answers["running"]) == 3)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.run()
    assert running.num_preemptions == 1
    assert engine.answers["running"] == TRUTH.answer(other, 100)
    assert engine.serve("b", text) == TRUTH.answer(text, 3)
    assert engine.loaded == {}
    assert engine.scheduler.reset_prefix_cache()  # the engine's own only
    assert engine.serve("c", text) == TRUTH.answer(text, 3)
    assert engine.loaded == {"c": 640}
    elsewhere = site.start()
    elsewhere.serve("d", text)
    assert elsewhere.loaded == {"d": 640}


# Before a worker hears of it, and when the daemon has given it slots to copy from or to.
@pytest.mark.parametrize("moment", ["load", "copy of a load", "save", "copy of a save"])
def test_a_daemon_that_is_killed_costs_no_answer_and_no_block(site: Site, moment: str) -> None:
    text, other = prompt(700), prompt(700, 1)
    site.start().serve("a", text)
    site.restart()
    engine = site.start()
    if moment == "load":
        engine.on_load = site.daemon.kill
    elif moment == "save":
        engine.on_save = site.daemon.kill
    else:
        copy = "write_blocks" if moment == "copy of a load" else "read_blocks"
        engine.worker.before_next(copy, site.daemon.kill)
    texts = {"b": text if "load" in moment else other, "c": text}
    for name, each in texts.items():
        engine.add(name, each, 100)
    engine.run()
    assert site.daemon.process.poll() is not None
    assert engine.answers == {name: TRUTH.answer(each, 100) for name, each in texts.items()}
    assert engine.used_blocks == 0
    site.daemon.start()
    after = site.start()
    assert after.serve("d", text) == TRUTH.answer(text, 3)
    assert after.serve("e", other) == TRUTH.answer(other, 3)


def test_a_daemon_that_hangs_costs_no_answer(site: Site) -> None:
    text = prompt(700)
    site.start().serve("a", text)
    site.restart()
    engine = site.start(extra={"load_timeout": 0.5, "match_timeout": 0.1})
    engine.on_load = site.stop
    assert engine.serve("b", text) == TRUTH.answer(text, 3)
    assert engine.used_blocks == 0


def test_what_is_stored_is_told_in_the_engines_events(site: Site) -> None:
    text = prompt(300)
    engine = site.start()
    answer = engine.serve("a", text, 150)
    stored = [
        event for event in engine.events if isinstance(event, BlockStored) and event.medium == "STORAGE"
    ]
    assert [token for event in stored for token in event.token_ids] == (text + answer)[:448]
    assert stored[0].parent_block_hash is None
    for before, after in itertools.pairwise(stored):
        assert after.parent_block_hash == before.block_hashes[-1]


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"policy": "fail"}, Unsupported, "recompute"),
        ({"extra": {"speed": 1}}, InvalidArgument, "speed"),
        ({"extra": {"url": 5}}, InvalidArgument, "url=5"),
        ({"block_size": 128}, Unsupported, "--block-size 128"),
    ],
)
def test_what_cannot_be_served_right_is_refused_at_start(
    site: Site, changes: dict[str, object], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        site.start(**changes)
