"""The ranks of a tensor-parallel vLLM server, each a process; vLLM's own sum of what they say."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.engines.ranks import RankProcesses
from tests.engines.vllm_engine import Known, Worker, cache_config, vllm_config


class Ranks:
    """Stands where ``Engine`` has its worker. ``changes`` are those of the engine."""

    def __init__(self, count: int, meeting: Path, url: str, model: Path, block_size: int, **changes: int):
        self.block_size = block_size
        self._aggregator = KVOutputAggregator(count)
        self._name = f"latentkv-{secrets.token_hex(8)}"
        given = (self._name, count, meeting, url, model, block_size, changes)
        self._ranks = RankProcesses(count, _begin, *given)

    def execute(self, step: SchedulerOutput, requests: dict[str, Known]) -> ModelRunnerOutput:
        outputs: list[ModelRunnerOutput] = self._ranks.ask("execute", step, requests)
        samples = [output.sampled_token_ids for output in outputs]
        assert samples == samples[:1] * len(samples)  # what each has in its own cache
        return self._aggregator.aggregate(outputs)

    def wipe(self) -> None:
        """Overwrite all pages of all ranks."""
        self._ranks.ask("wipe")

    def counters(self) -> list[Counter[str]]:
        """Of each rank."""
        return self._ranks.ask("counters")

    def close(self) -> None:
        self._ranks.close()
        for left in Path("/dev/shm").glob(f"{self._name}-*"):  # by vLLM's process group
            left.unlink()


class _Rank(Worker):
    def wipe(self) -> None:
        for data in self.bytes.values():
            data.fill_(0xEE)

    def counters(self) -> Counter[str]:
        return self.connector._worker.counters()


def _begin(
    rank: int,
    name: str,
    count: int,
    meeting: Path,
    url: str,
    model: Path,
    block_size: int,
    changes: dict[str, int],
) -> _Rank:
    torch.set_num_threads(1)
    os.environ["VLLM_DIST_IDENT"] = name  # vLLM's CPU worker names its process group so
    num_blocks = changes.pop("num_blocks")
    config = vllm_config(url, model, block_size, ranks=count, **changes)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(count, rank, f"file://{meeting}", rank, "gloo")
        parallel_state.initialize_model_parallel(count)
    return _Rank(config, cache_config(block_size, num_blocks))
