"""What processor time does a request that misses cost a vLLM worker?

    make .venv-engines/.ready
    .venv-engines/bin/python -m benchmarks.miss_cost --json out/miss_cost.json

Two vLLM servers of one small random model on this CPU, one with our connector over a real daemon, get
the same prompts in turn. None was seen before: with the connector it is matched, computed and stored
whole. A server's cost of a request is the processor time of its process, all threads, from that
request's start to the next one's, so whatever is stored behind it counts too.

The model is small, so the share is large: a real one computes many times as much for each byte that is
stored. The milliseconds a request are the figure to take elsewhere. Run it on a quiet machine: processor
time grows by a tenth and more where others share the cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from benchmarks import arguments
from benchmarks.arguments import Parser, machine, require_vllm, workplace, write_json
from benchmarks.daemon import Daemon
from benchmarks.options import BenchmarkError
from benchmarks.ratios import Ratio
from kvstore.layout import BLOCK_TOKENS

VOCABULARY = 256
_START_SECONDS = 300.0  # for a server to load, or to answer


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

    def serve(self, prompt: list[int]) -> tuple[float, int]:
        """Serve one; the process's processor seconds before it, and blocks stored by then."""
        try:
            self._pipe.send(prompt)
            if not self._pipe.poll(_START_SECONDS):
                raise BenchmarkError("a server does not answer")
            answer: tuple[float, int] = self._pipe.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            raise BenchmarkError("a server ended; its last words are above") from None
        return answer


def _serve(pipe: Connection, url: str | None, model: Path, tokens: int) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # One thread: those that wait for each other spin, and that would count.
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=tokens + 64,
        enforce_eager=True,
        attention_backend="CPU_MLA",  # whatever the processor has
        kv_transfer_config=None if url is None else _transfer_config(url),
    )
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    while True:
        try:
            prompt = pipe.recv()
        except (EOFError, ConnectionResetError):
            engine.llm_engine.engine_core.shutdown()
            return
        stored = 0 if url is None else get_kv_transfer_group()._worker.counters()["stored_blocks"]
        before = time.process_time()
        engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        pipe.send((before, stored))


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
    """Processor seconds of each request, one by one, with the connector and without."""

    ours: list[float]
    bare: list[float]
    stored_blocks: int

    @property
    def extra(self) -> float:
        """Median of the differences, seconds."""
        return median(one - other for one, other in zip(self.ours, self.bare, strict=True))

    @property
    def ratio(self) -> Ratio:
        return Ratio.of(self.ours, self.bare)


def main(options: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 2 on bad input."""
    return arguments.run("miss_cost", lambda: _benchmark(_parse(options), Console()))


def _parse(options: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("miss_cost", "What a miss costs a vLLM worker.", arena="1GiB")
    add = parser.add_argument
    add("--tokens", type=arguments.at_least(BLOCK_TOKENS), default=2048, metavar="N", help="a prompt [2048]")
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
            "cpu_seconds": {"connector": cost.ours, "none": cost.bare},
            "extra_seconds": cost.extra,
            "ratio": cost.ratio.ratio,
            "stored_blocks": cost.stored_blocks,
        },
    )


def _measure(url: str, model: Path, options: argparse.Namespace) -> Cost:
    marks: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    with Server(url, model, options.tokens) as ours, Server(None, model, options.tokens) as bare:
        for seed in range(options.requests + 2):  # the first warms up, the last only ends the one before
            prompt = random.Random(seed).choices(range(VOCABULARY), k=options.tokens)
            order = (True, False) if seed % 2 else (False, True)
            for connected in order:
                marks[connected].append((ours if connected else bare).serve(prompt))
    stored = marks[True][-1][1]
    if stored < options.requests * (options.tokens // BLOCK_TOKENS):
        raise BenchmarkError(f"only {stored} blocks were stored: this would be no measure of a miss")
    times = {which: [mark[0] for mark in some] for which, some in marks.items()}
    spent = {which: [after - before for before, after in pairwise(some[1:])] for which, some in times.items()}
    return Cost(spent[True], spent[False], stored)


def _table(cost: Cost, tokens: int) -> Table:
    made = Table(title=f"A prompt of {tokens:,} tokens that misses: processor time of a vLLM worker")
    made.add_column("")
    made.add_column("a request", justify="right")
    made.add_row("with the connector, p50", f"{1000 * median(cost.ours):.1f} ms")
    made.add_row("without, p50", f"{1000 * median(cost.bare):.1f} ms")
    made.add_row("difference, p50 of pairs", f"{1000 * cost.extra:.1f} ms")
    made.add_row("ratio, p50 of pairs", f"{cost.ratio.ratio:.4f}")
    made.add_row("blocks stored", f"{cost.stored_blocks:,}")
    return made


if __name__ == "__main__":
    sys.exit(main())
