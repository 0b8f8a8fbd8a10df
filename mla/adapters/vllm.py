"""vLLM's KV connector over a latentkv daemon: ``--kv-transfer-config`` names this module (docs/vllm.md).

One object in the scheduler process decides, one in each worker copies; this class only
hands vLLM's calls to the one that its role has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.forward_context import ForwardContext
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from mla.adapters.paged import PagedCache
from mla.adapters.settings import VllmSettings
from mla.adapters.vllm_lookup import Lookup
from mla.adapters.vllm_namespace import AdapterNames, base_namespace, cache_shape, check_server
from mla.adapters.vllm_orders import StepOrders, StoredDepths
from mla.adapters.vllm_scheduler import SchedulerSide
from mla.adapters.vllm_worker import WorkerSide

CALL_TIMEOUT = 2.0  # seconds that a call of the daemon may take


class LatentKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Raises ``Unsupported`` or ``InvalidArgument`` at start for a server it cannot serve right."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = VllmSettings.parse(self._kv_transfer_config.kv_connector_extra_config)
        self._shape = cache_shape(vllm_config, kv_cache_config)
        check_server(vllm_config)
        # Only who decides needs a name, and to read a checkpoint takes a while.
        self._scheduler_side = self._decider() if role is KVConnectorRole.SCHEDULER else None
        self._worker_side: WorkerSide | None = None  # once there is a cache to copy from and to
        self._failed_pages: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss."""
        return False

    # --- scheduler

    def _decider(self) -> SchedulerSide:
        base = base_namespace(self._vllm_config, self._shape.layout, self._settings)
        events = self._vllm_config.kv_events_config
        return SchedulerSide(
            Lookup(self._settings.connect(CALL_TIMEOUT), base, AdapterNames()),
            self._settings,
            self._shape.page_tokens,
            ranks=self._vllm_config.parallel_config.local_world_size,
            events=events is not None and events.enable_kv_cache_events,
        )

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self._scheduler_side is not None, "this object serves a worker"
        return self._scheduler_side

    def on_new_request(self, request: Request) -> None:
        """Match is asked."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How much Match found; None while it is not known."""
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A load is ordered."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """A load's tokens by tier."""
        tiers = self._scheduler.hit_tiers(request, num_external_tokens)
        return {CacheHitSource(tier): tokens for tier, tokens in tiers.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Loads and stores of this step."""
        return self._scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What workers have done."""
        self._scheduler.update(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The last stores are ordered; True while there are any."""
        return self._scheduler.finished(request, block_ids), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See ``request_finished``; there is one group (``cache_shape``)."""
        return self._scheduler.finished(request, block_ids[0]), None

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Blocks that the store holds now."""
        return self._scheduler.take_events()

    def reset_cache(self) -> bool:
        """Nothing of before is found from now on; other servers keep theirs."""
        self._scheduler.reset()
        return True

    # --- worker

    @property
    def _worker(self) -> WorkerSide:
        assert self._worker_side is not None, "register_kv_caches comes first"
        return self._worker_side

    @property
    def _orders(self) -> StepOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        return orders

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The cache to copy from and to."""
        shape, settings = self._shape, self._settings
        layers = [kv_caches[name] for name in shape.layers]
        self._worker_side = WorkerSide(
            settings.connect(CALL_TIMEOUT),
            PagedCache(layers, shape.layout, shape.page_tokens),
            load_timeout=settings.load_timeout,
            store_deadline=settings.store_deadline,
            writes=get_tensor_model_parallel_rank() == 0,
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Loads and stores of preempted and aborted requests end."""
        assert isinstance(kv_connector_metadata, StepOrders)
        self._worker.drop(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Loads start; they end between steps."""
        self._worker.load(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs once its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing to do: whole blocks are stored, all layers at once."""

    def wait_for_save(self) -> None:
        """Stores are queued, not waited for: the scheduler keeps the blocks."""
        self._worker.save(self._orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads and stores that have ended."""
        loads = self._worker.finished_loads()
        self._failed_pages |= loads.failed_pages
        return KVConnectorTransferResults(
            finished_sending=self._worker.finished_saves(finished_req_ids),
            finished_recving=loads.requests,
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same for callers that don't ask for failures."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that the loads reported last did not fill."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """How far requests are stored."""
        depths = self._worker.stored_depths()
        return StoredDepths(depths) if depths else None

    # --- both

    def shutdown(self) -> None:
        """Threads and connections end."""
        for side in (self._scheduler_side, self._worker_side):
            if side is not None:
                side.close()
