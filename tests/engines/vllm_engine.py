"""vLLM's own scheduler and worker calls around a model whose answers show every wrong byte.

The model's latent of a token is a hash of all tokens up to it, and its next token a hash of
all cached bytes of the prefix: one wrong byte in the cache is another answer.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_events import KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.engines.checkpoint import LAYERS, RANK, ROPE, VOCABULARY

ENTRY = (RANK + ROPE) * 2  # bytes
DEADLINE = 60.0  # seconds after which a test has hung; nothing is timed by it


def vllm_config(url: str | None, model: Path, block_size: int, **changes: Any) -> VllmConfig:
    """With our connector to ``url``, or with none."""
    extra = {"url": url, "load_timeout": 20.0, "match_timeout": 20.0, **changes.pop("extra", {})}
    chunk = changes.pop("chunk", 256)
    length = changes.pop("length", 32768)
    policy = changes.pop("policy", "recompute")
    parallel = ParallelConfig(tensor_parallel_size=changes.pop("ranks", 1), distributed_executor_backend="mp")
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length
        ),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True, cache_dtype="auto"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=chunk,
            max_model_len=length,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig("cpu"),
        parallel_config=parallel,
        kv_transfer_config=None if url is None else _transfer_config(extra, policy),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    # The CPU backend's kernels want other settings; none of them runs here.
    config.cache_config.block_size = block_size
    config.cache_config.enable_prefix_caching = True
    config.scheduler_config.enable_chunked_prefill = True
    config.scheduler_config.max_num_batched_tokens = chunk
    config.cache_config.num_gpu_blocks = 0
    assert not changes, changes
    return config


def _transfer_config(extra: dict[str, Any], policy: str) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="LatentKVConnector",
        kv_connector_module_path="mla.adapters.vllm",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config=extra,
    )


def cache_config(block_size: int, num_blocks: int) -> KVCacheConfig:
    spec = MLAAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=RANK + ROPE, dtype=torch.bfloat16
    )
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )


class Truth:
    """What the model computes: latents and next tokens, from tokens alone."""

    def entries(self, tokens: Sequence[int]) -> torch.Tensor:
        """``[layers, tokens, ENTRY]`` bytes."""
        digest = b""
        rows: list[bytes] = []
        for token in tokens:
            digest = hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=32).digest()
            rows.append(hashlib.shake_128(digest).digest(LAYERS * ENTRY))
        flat = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
        return flat.view(len(tokens), LAYERS, ENTRY).transpose(0, 1)

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(next_token(self.entries(tokens)))
        return tokens[len(prompt) :]


def next_token(cached: torch.Tensor) -> int:
    """From the cached bytes of the whole prefix ``[layers, tokens, ENTRY]``."""
    digest = hashlib.blake2b(cached.contiguous().numpy().tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


@dataclass(frozen=True)
class Known:
    """What a worker knows of a request."""

    request_id: str
    num_computed_tokens: int
    all_token_ids: list[int]

    @classmethod
    def of(cls, request: Request) -> Known:
        return cls(request.request_id, request.num_computed_tokens, list(request.all_token_ids))


@dataclass
class Worker:
    """What vLLM's model runner does with a step, around the model of this module."""

    config: VllmConfig
    cache: KVCacheConfig
    truth: Truth = field(default_factory=Truth)
    tables: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.block_size = self.cache.kv_cache_groups[0].kv_cache_spec.block_size
        shape = (self.cache.num_blocks, 1, self.block_size, ENTRY)
        names = self.cache.kv_cache_groups[0].layer_names
        self.bytes = {name: torch.full(shape, 0xEE, dtype=torch.uint8) for name in names}
        self.connector = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.cache)
        self.connector.register_kv_caches(
            {name: data.view(torch.bfloat16) for name, data in self.bytes.items()}
        )

    def execute(self, step: SchedulerOutput, requests: dict[str, Known]) -> ModelRunnerOutput:
        connector = self.connector
        connector.handle_preemptions(step.kv_connector_metadata)
        connector.bind_connector_metadata(step.kv_connector_metadata)
        self._update_tables(step)
        counts = step.num_scheduled_tokens
        samples = {name: self._run(requests[name], count) for name, count in counts.items()}
        connector.start_load_kv(None)
        connector.wait_for_save()
        output = KVConnectorOutput()
        results = connector.get_transfer_results(step.finished_req_ids)
        output.finished_sending = results.finished_sending or None
        output.finished_recving = results.finished_recving or None
        output.failed_recving = results.failed_recving
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=list(samples),
            req_id_to_index={name: at for at, name in enumerate(samples)},
            sampled_token_ids=list(samples.values()),
            kv_connector_output=output,
        )

    def _update_tables(self, step: SchedulerOutput) -> None:
        for new in step.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
        cached = step.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = []
            self.tables[name] += blocks[0] if blocks else []

    def before_next(self, copy: str, act: Callable[[], object]) -> None:
        """Act once our connector is about to ``write_blocks`` into the cache, or ``read_blocks`` of it."""
        cache = self.connector._worker._cache
        do_copy = getattr(cache, copy)

        def act_and_copy(*given: Any) -> None:
            setattr(cache, copy, do_copy)
            act()
            do_copy(*given)

        setattr(cache, copy, act_and_copy)

    def close(self) -> None:
        self.connector.shutdown()

    def _run(self, request: Known, count: int) -> list[int]:
        """Compute ``count`` tokens; the sampled one, once the last known token is computed."""
        stop = request.num_computed_tokens
        tokens = list(request.all_token_ids[:stop])
        fresh = self.truth.entries(tokens)[:, stop - count :]
        pages = torch.tensor(self.tables[request.request_id])
        slots = (pages[:, None] * self.block_size + torch.arange(self.block_size)).view(-1)
        for layer, data in enumerate(self.bytes.values()):
            data.view(-1, ENTRY)[slots[stop - count : stop]] = fresh[layer]
        if stop < len(request.all_token_ids):
            return []
        cached = torch.stack([data.view(-1, ENTRY)[slots[:stop]] for data in self.bytes.values()])
        return [next_token(cached)]


class Engine:
    """One server: scheduler, and a worker of one rank unless others are made."""

    def __init__(
        self,
        url: str,
        model: Path,
        *,
        block_size: int = 16,
        num_blocks: int = 600,
        make_worker: Callable[[VllmConfig, KVCacheConfig], Any] = Worker,
        **changes: Any,
    ) -> None:
        self.config = vllm_config(url, model, block_size, **changes)
        self.config.cache_config.num_gpu_blocks = num_blocks
        cache = cache_config(block_size, num_blocks)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            log_stats=True,
        )
        self.scheduler.kv_event_publisher.publish = self._publish
        self.worker = make_worker(self.config, cache)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, Any] = {}
        self.loaded: dict[str, int] = {}  # tokens that came from the connector
        self.events: list[Any] = []
        self.on_load: Callable[[], None] = lambda: None  # a load was ordered, and not started yet
        self.on_save: Callable[[], None] = lambda: None  # the same of a store
        self.requests: dict[str, Request] = {}

    def add(self, name: str, prompt: Sequence[int], answer: int = 3, **options: Any) -> Request:
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
            **options,
        )
        self.requests[name] = request
        self.answers[name] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _publish(self, batch: KVEventBatch) -> None:
        """The scheduler's events arrive here."""
        self.events += batch.events

    def step(self) -> SchedulerOutput:
        step = self.scheduler.schedule()
        for order in step.kv_connector_metadata.loads:
            pages = sum(page >= 0 for place in order.places for page in place)
            before = self.loaded.get(order.request, 0)
            self.loaded[order.request] = before + pages * self.worker.block_size
        if step.kv_connector_metadata.loads:
            self.on_load()
        if step.kv_connector_metadata.saves:
            self.on_save()
        known = {name: Known.of(self.requests[name]) for name in step.num_scheduled_tokens}
        output = self.worker.execute(step, known)
        for outputs in self.scheduler.update_from_output(step, output).values():
            for one in outputs.outputs:
                self._take(one)
        return step

    def _take(self, output: EngineCoreOutput) -> None:
        self.answers[output.request_id] += output.new_token_ids
        if output.finish_reason is not None:
            self.reasons[output.request_id] = output.finish_reason

    def run_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, "the engine hangs"
            self.step()

    def run(self) -> None:
        """Until every request has ended and every block is given back."""
        self.run_until(lambda: not self.scheduler.has_requests())

    def serve(self, name: str, prompt: Sequence[int], answer: int = 3, **options: Any) -> list[int]:
        self.add(name, prompt, answer, **options)
        self.run()
        return self.answers[name]

    @property
    def used_blocks(self) -> int:
        """Blocks that some request holds; one is vLLM's own null block."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.close()
