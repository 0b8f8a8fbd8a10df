"""How long does vLLM's scheduler wait for Match?

    make .venv-engines/.ready
    .venv-engines/bin/python -m benchmarks.scheduler_wait --json out/scheduler_wait.json

vLLM's own scheduler gets prompts of 131,072 tokens, with our connector over a real daemon (a prompt
that it has never seen, and one that is stored) and without any, in turn. What counts is the time that
the scheduler's thread spends inside the connector's calls until the request is admitted: threads
that hash meanwhile hold Python's interpreter, so this has their part too. Between its steps the thread
sleeps for a millisecond as vLLM's engine does with nothing to run.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import kvstore
from benchmarks import arguments
from benchmarks.arguments import Parser, machine, require_vllm, workplace, write_json
from benchmarks.daemon import Daemon
from benchmarks.options import BenchmarkError
from kvstore.layout import BLOCK_TOKENS
from kvstore.testing.chains import store_chain

PAGE_TOKENS = 16
_CHUNK = 8192  # tokens of a step
_IDLE = 0.001  # seconds that vLLM's engine sleeps after a step that ran nothing
_GIVE_UP = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class Wait:
    """Seconds of one request: in the connector's calls, in the scheduler's, and until it was admitted."""

    connector: float
    scheduler: float
    admitted: float
    loaded: int  # tokens that come from the store


class Clock:
    """Time spent inside calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, its time added."""

        @functools.wraps(call)
        def run(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return run


class Engine:
    """vLLM's scheduler, with our connector to ``url`` or with none; what it schedules is not run."""

    def __init__(self, url: str | None, model: Path, tokens: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from tests.engines import vllm_engine

        config = vllm_engine.vllm_config(url, model, PAGE_TOKENS, chunk=_CHUNK, length=2 * tokens)
        config.cache_config.num_gpu_blocks = 2 * tokens // PAGE_TOKENS
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=vllm_engine.cache_config(PAGE_TOKENS, config.cache_config.num_gpu_blocks),
            structured_output_manager=StructuredOutputManager(config),
            block_size=PAGE_TOKENS,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(PAGE_TOKENS, sha256)
        self._clock = Clock()
        self.connector = self._scheduler.connector
        if url is not None:
            ours, timed = self.connector, self._clock.timed
            ours.on_new_request = timed(ours.on_new_request)
            ours.get_num_new_matched_tokens = timed(ours.get_num_new_matched_tokens)

    def request(self, name: str, prompt: list[int]) -> Wait:
        """From a request's arrival until it is admitted; then it is aborted."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request, RequestStatus

        request = Request(name, prompt, SamplingParams(max_tokens=1), None, block_hasher=self._hasher)
        self._clock.seconds = 0.0
        arrived = time.perf_counter()
        self._scheduler.add_request(request)
        scheduler = time.perf_counter() - arrived
        while True:
            began = time.perf_counter()
            step = self._scheduler.schedule()
            scheduler += time.perf_counter() - began
            if request.status is not RequestStatus.WAITING:
                break
            if time.perf_counter() - arrived > _GIVE_UP:
                raise BenchmarkError("the scheduler admits nothing; look at the daemon's log")
            self._end_step(step)
            time.sleep(_IDLE)
        admitted = time.perf_counter() - arrived
        loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        loaded = request.num_computed_tokens if loading else 0
        self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self._end_step(step)
        held = {name} & self._scheduler.requests.keys()  # until workers have loaded or stored
        self._end_step(self._scheduler.schedule(), held if loading else set(), set() if loading else held)
        return Wait(self._clock.seconds, scheduler, admitted, loaded)

    def _end_step(self, step: Any, loaded: Set[str] = frozenset(), stored: Set[str] = frozenset()) -> None:
        """What workers would have said: nothing was run, these requests' loads and stores have ended."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        names = list(step.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[] for _ in names],
            kv_connector_output=KVConnectorOutput(
                finished_recving=set(loaded) or None, finished_sending=set(stored) or None
            ),
        )
        self._scheduler.update_from_output(step, output)

    def close(self) -> None:
        self._scheduler.shutdown()


def main(options: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 2 on bad input."""
    return arguments.run("scheduler_wait", lambda: _benchmark(_parse(options), Console()))


def _parse(options: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("scheduler_wait", "What vLLM's scheduler waits for Match.", arena="256MiB")
    add = parser.add_argument
    add("--tokens", type=arguments.at_least(BLOCK_TOKENS + 1), default=131072, metavar="N", help="[131072]")
    add("--requests", type=arguments.at_least(3), default=40, metavar="N", help="of each kind [40]")
    return parser.parse_args(options)


def _benchmark(options: argparse.Namespace, console: Console) -> None:
    require_vllm()
    from tests.engines.checkpoint import checkpoint

    with workplace(options.data, 1 << 30) as place:
        flags = ["--host-bytes", str(options.arena), "--disk-bytes", "512MiB", "--payloads", options.payloads]
        with Daemon(place / "store", flags) as daemon:
            waits = _measure(daemon.url, checkpoint(place / "model"), options)
    console.print(_table(waits, options.tokens))
    write_json(
        options.json,
        {
            "about": machine() | {"tokens": options.tokens, "requests": options.requests},
            "p50": {kind: asdict(_median(some)) for kind, some in waits.items()},
            "waits": {kind: [asdict(wait) for wait in some] for kind, some in waits.items()},
        },
    )


def _measure(url: str, model: Path, options: argparse.Namespace) -> dict[str, list[Wait]]:
    ours, bare = Engine(url, model, options.tokens), Engine(None, model, options.tokens)
    stored = _prompt(0, options.tokens)
    _store(url, ours, stored)
    kinds: dict[str, Callable[[str, int], Wait]] = {
        "never seen": lambda name, seed: ours.request(name, _prompt(seed, options.tokens)),
        "stored": lambda name, _: ours.request(name, list(stored)),
        "no connector": lambda name, seed: bare.request(name, _prompt(seed, options.tokens)),
    }
    waits: dict[str, list[Wait]] = {kind: [] for kind in kinds}
    for seed in range(1, options.requests + 2):
        for kind, run in kinds.items():
            waits[kind].append(run(f"{kind} {seed}", seed))
    ours.close()
    bare.close()
    return {kind: some[1:] for kind, some in waits.items()}  # the first of each warms up


def _prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=tokens)


def _store(url: str, engine: Engine, prompt: list[int]) -> None:
    """Store a prompt's blocks, under the names that the connector gives them."""
    lookup = engine.connector._scheduler._lookup
    answer = lookup.match(prompt, len(prompt), {}, ("", "", 0))
    if answer.chain is None:
        raise BenchmarkError(f"the daemon gave no answer: {dict(lookup.counters())}")
    client = kvstore.connect(url)
    namespace = client.open_namespace(answer.chain.namespace)
    store_chain(client, namespace, answer.hashes, nbytes=answer.chain.namespace.layout.block_bytes)
    client.close()


def _median(waits: Sequence[Wait]) -> Wait:
    return Wait(
        median(wait.connector for wait in waits),
        median(wait.scheduler for wait in waits),
        median(wait.admitted for wait in waits),
        round(median(wait.loaded for wait in waits)),
    )


def _table(waits: dict[str, list[Wait]], tokens: int) -> Table:
    made = Table(title=f"A prompt of {tokens:,} tokens in vLLM's scheduler, p50")
    for title in ("prompt", "in the connector's calls", "in the scheduler's", "until admitted", "loaded"):
        made.add_column(title, justify="left" if title == "prompt" else "right")
    for kind, some in waits.items():
        wait = _median(some)
        times = (f"{1000 * part:.2f} ms" for part in (wait.connector, wait.scheduler, wait.admitted))
        made.add_row(kind, *times, f"{wait.loaded:,}")
    return made


if __name__ == "__main__":
    sys.exit(main())
