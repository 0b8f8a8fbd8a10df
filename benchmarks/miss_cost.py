"""What processor time does a request that misses cost a vLLM worker?

    make .venv-engines/.ready
    .venv-engines/bin/python -m benchmarks.miss_cost --json out/miss_cost.json

Two vLLM servers of one small random model on this CPU, one with our connector over a real daemon, get
the same prompts in turn. None was seen before: with the connector it is matched, computed and stored
whole. A server's cost of a request is the processor time of its process (scheduler and worker in one),
all threads, from its start until all of it is stored. Only gloo's threads don't count: vLLM makes them
for its ranks, and they poll by the clock.

Two figures come of it. The *ratio* of the two servers has everything in it, also what vLLM itself does
more with a connector, and the noise of two large numbers. The *parts* are what the engine's thread spends
in the connector's methods, and what the connector's own threads spend: those that match, that store, that
run gRPC. They have little noise, and miss what a connector costs vLLM's own code.

The model is small, so the share is large: a real one computes many times as much for each byte that is
stored. The milliseconds are the figure to take elsewhere. Run it on a quiet machine: processor time grows
by a tenth and more where others share the cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from functools import wraps
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from statistics import median
from types import FunctionType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from benchmarks import arguments
from benchmarks.arguments import Parser, machine, require_vllm, workplace, write_json
from benchmarks.daemon import Daemon
from benchmarks.options import BenchmarkError
from benchmarks.ratios import lower_bound
from kvstore.layout import BLOCK_TOKENS

VOCABULARY = 256
_START_SECONDS = 300.0  # for a server to load, or to answer
_IDLE_SECONDS = 0.001
_STORE_SECONDS = 5.0  # for all of a prompt to be stored
# Threads by the beginnings of their names, the first that fits.
_PARTS = {
    "latentkv-match": "match",
    "latentkv-store": "store",
    "latentkv-": "others",
    "event_engine": "grpc",
    "grpc": "grpc",
    "lifeguard": "grpc",
    "gloo": "polling",
}


@dataclass(frozen=True, slots=True)
class Spent:
    """Processor seconds of a server, of its life so far or of one request.

    ``calls`` are those of the engine's thread inside the connector, ``others`` those of threads of
    ours that neither match nor store; ``engine`` are those of all threads that are not ours.
    """

    engine: float
    calls: float
    match: float
    store: float
    others: float
    grpc: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def parts(self) -> float:
        """What is the connector's."""
        return self.calls + self.match + self.store + self.others + self.grpc

    @property
    def total(self) -> float:
        """All of it."""
        return self.engine + self.match + self.store + self.others + self.grpc


def _seconds_by_part() -> dict[str, float]:
    """Processor seconds of this process's threads so far."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    seconds: dict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            name = names.get(int(task.name)) or (task / "comm").read_text()
            part = next((part for prefix, part in _PARTS.items() if name.startswith(prefix)), "engine")
            seconds[part] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


class CallClock:
    """Processor time of the calling thread inside the methods of a class."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False  # one method may call another

    def watch(self, watched: type) -> None:
        """From now on its public methods are timed."""
        for name, call in list(vars(watched).items()):
            if isinstance(call, FunctionType) and not name.startswith("_"):
                setattr(watched, name, self._timed(call))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def run(*given: Any, **named: Any) -> Any:
            if self._inside:
                return call(*given, **named)
            self._inside, began = True, time.thread_time()
            try:
                return call(*given, **named)
            finally:
                self._inside = False
                self.seconds += time.thread_time() - began

        return run

    def spent(self) -> Spent:
        """So far."""
        by_part = _seconds_by_part()
        fields = ("match", "store", "others", "grpc")
        return Spent(by_part["engine"], self.seconds, *(by_part[field] for field in fields))


class Server:
    """A vLLM server in a process of its own, with our connector to ``url`` or with none."""

    def __init__(self, url: str | None, model: Path, tokens: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, url, model, tokens), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()  # ends its loop
        self._process.join(30)
        self._process.kill()

    def serve(self, prompt: list[int]) -> tuple[Spent, int]:
        """Serve one; what was spent for it, and blocks stored until now."""
        try:
            self._pipe.send(prompt)
            if not self._pipe.poll(_START_SECONDS):
                raise BenchmarkError("a server does not answer")
            answer: tuple[Spent, int] = self._pipe.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            raise BenchmarkError("a server ended; its last words are above") from None
        return answer


def _serve(pipe: Connection, url: str | None, model: Path, tokens: int) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # One thread: those that wait for each other spin, and that would count.
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import LLM, SamplingParams

    from mla.adapters.vllm import LatentKVConnector

    clock = CallClock()
    clock.watch(LatentKVConnector)
    engine = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=tokens + 64,
        enforce_eager=True,
        attention_backend="CPU_MLA",  # whatever the processor has
        compilation_config={"custom_ops": ["-rotary_embedding"]},  # vLLM's own is wrong for MLA on a CPU
        kv_transfer_config=None if url is None else _transfer_config(url),
    )
    _rest_between_steps(engine.llm_engine.engine_core.engine_core)
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    served = 0
    while True:
        try:
            prompt = pipe.recv()
        except (EOFError, ConnectionResetError):
            engine.llm_engine.engine_core.shutdown()
            return
        before = clock.spent()
        engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        served += 1
        due = 0 if url is None else served * (len(prompt) // BLOCK_TOKENS)
        end = time.monotonic() + _STORE_SECONDS
        while (stored := _stored(url)) < due and time.monotonic() < end:
            time.sleep(0.01)
        pipe.send((clock.spent() - before, stored))


def _rest_between_steps(core: Any) -> None:
    """Sleep after a step that ran nothing: vLLM's servers do, its ``LLM`` in one process does not."""
    step = core.step_fn

    def step_and_rest() -> tuple[Any, bool]:
        outputs, executed = step()
        if not executed and core.scheduler.has_requests():
            time.sleep(_IDLE_SECONDS)
        return outputs, executed

    core.step_fn = step_and_rest


def _stored(url: str | None) -> int:
    """Blocks that this server has stored."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return 0 if url is None else get_kv_transfer_group()._worker.counters()["stored_blocks"]


def _transfer_config(url: str) -> dict[str, Any]:
    return {
        "kv_connector": "LatentKVConnector",
        "kv_connector_module_path": "mla.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url},
    }


def _save_model(path: Path) -> None:
    """Four dense layers of hidden size 1024 with the true cache geometry: 37 million weights."""
    import torch
    from transformers import DeepseekV3ForCausalLM

    from mla.tiny import fill_weights, tiny_config

    config = tiny_config()
    config.update(
        {
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "first_k_dense_replace": config.num_hidden_layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        }
    )
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config)
    fill_weights(model, 0)
    model.save_pretrained(path)


@dataclass(frozen=True, slots=True)
class Cost:
    """What each request cost, one by one, with the connector and without."""

    ours: list[Spent]
    bare: list[Spent]
    stored_blocks: int

    @property
    def ratios(self) -> list[float]:
        return [one.total / other.total for one, other in zip(self.ours, self.bare, strict=True)]

    @property
    def high(self) -> float:
        """The bound that a bootstrap puts over the median of the ratios: nine of ten runs lie below it."""
        return -lower_bound([-ratio for ratio in self.ratios])

    @property
    def extra(self) -> float:
        """Median of the connector's parts, seconds."""
        return median(one.parts for one in self.ours)

    @property
    def share(self) -> float:
        """``extra`` of what a request costs without a connector."""
        return self.extra / median(spent.total for spent in self.bare)


def main(options: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 2 on bad input."""
    return arguments.run("miss_cost", lambda: _benchmark(_parse(options), Console()))


def _parse(options: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("miss_cost", "What a miss costs a vLLM worker.", arena="1GiB")
    add = parser.add_argument
    add("--tokens", type=arguments.at_least(BLOCK_TOKENS), default=4096, metavar="N", help="a prompt [4096]")
    add("--requests", type=arguments.at_least(2), default=12, metavar="N", help="of each server [12]")
    return parser.parse_args(options)


def _benchmark(options: argparse.Namespace, console: Console) -> None:
    require_vllm()
    with workplace(options.data, 4 << 30) as place:
        _save_model(place / "model")
        flags = ["--host-bytes", str(options.arena), "--disk-bytes", "2GiB", "--payloads", options.payloads]
        with Daemon(place / "store", flags) as daemon:
            cost = _measure(daemon.url, place / "model", options)
    console.print(_table(cost, options.tokens))
    write_json(
        options.json,
        {
            "about": machine() | {"tokens": options.tokens, "requests": options.requests},
            "cpu_seconds": {
                "connector": [asdict(spent) for spent in cost.ours],
                "none": [asdict(spent) for spent in cost.bare],
            },
            "ratio": median(cost.ratios),
            "ratio_high": cost.high,
            "parts_seconds": cost.extra,
            "parts_share": cost.share,
            "stored_blocks": cost.stored_blocks,
        },
    )


def _measure(url: str, model: Path, options: argparse.Namespace) -> Cost:
    marks: dict[bool, list[tuple[Spent, int]]] = {True: [], False: []}
    with Server(url, model, options.tokens) as ours, Server(None, model, options.tokens) as bare:
        for seed in range(options.requests + 1):  # the first warms up
            prompt = random.Random(seed).choices(range(VOCABULARY), k=options.tokens)
            order = (True, False) if seed % 2 else (False, True)
            for connected in order:
                marks[connected].append((ours if connected else bare).serve(prompt))
    stored = marks[True][-1][1]
    if stored != (options.requests + 1) * (options.tokens // BLOCK_TOKENS):
        raise BenchmarkError(f"{stored} blocks were stored, not all: this would be no measure of a miss")
    spent = {which: [one for one, _ in some[1:]] for which, some in marks.items()}
    return Cost(spent[True], spent[False], stored)


def _table(cost: Cost, tokens: int) -> Table:
    made = Table(title=f"A prompt of {tokens:,} tokens that misses: processor time of a vLLM server, p50")
    for name in ("", "with", "without"):
        made.add_column(name, justify="right" if name else "left")
    for label, part in (
        ("all threads", "total"),
        ("engine's thread, in the connector", "calls"),
        ("threads of Match", "match"),
        ("thread of the stores", "store"),
        ("threads of gRPC", "grpc"),
        ("our other threads", "others"),
    ):
        sides = (f"{1000 * median(map(attrgetter(part), side)):.2f} ms" for side in (cost.ours, cost.bare))
        made.add_row(label, *sides)
    made.add_row("parts in all", f"{1000 * cost.extra:.2f} ms", "")
    made.add_row("of a request without", f"{100 * cost.share:.2f}%", "")
    ratios = f"{min(cost.ratios):.3f}-{max(cost.ratios):.3f}"
    made.add_row("ratio of all threads", f"{median(cost.ratios):.4f}", ratios)
    made.add_row("its upper 10% bound", f"{cost.high:.4f}", "")
    made.add_row("blocks stored", f"{cost.stored_blocks:,}", "")
    return made


if __name__ == "__main__":
    sys.exit(main())
