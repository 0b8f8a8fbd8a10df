"""SGLang's own host pool, controller and storage factory on a CPU."""

from __future__ import annotations

import importlib.machinery
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import transformers

# SGLang imports torchvision for its image processors. The wheels of it would bring another
# torch, so it is a stand-in here, after transformers has looked for it in vain.
transformers.AutoProcessor  # noqa: B018


class _Stub(importlib.machinery.PathFinder):
    """Finds every module of torchvision, and nothing in any."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, cls(), is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return MagicMock(name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


sys.meta_path.append(_Stub)

import torch  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

PAGE = 64
LAYERS, RANK, ROPE = 3, 32, 16
PAGES = 40


def device_pool() -> MLATokenToKVPool:
    return MLATokenToKVPool(
        size=PAGE * PAGES,
        page_size=PAGE,
        dtype=torch.bfloat16,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def host_pool(device: MLATokenToKVPool, order: str, page_size: int = PAGE) -> MLATokenToKVPoolHost:
    pool = MLATokenToKVPoolHost(
        device._mla_buffer_info(),
        1.0,
        0,
        page_size,
        order,
        pin_memory=False,
        device_capacity_tokens=PAGE * PAGES,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )
    pool.kv_buffer.view(torch.uint8).fill_(0xEE)
    return pool


def extra_config(url: str, **changes: Any) -> dict[str, Any]:
    return {
        "backend_name": "latentkv",
        "module_path": "mla.adapters.sglang",
        "class_name": "LatentHiCache",
        "interface_v1": 1,
        "url": url,
        **changes,
    }


def storage_config(model: Path, extra: dict[str, Any], **changes: Any) -> HiCacheStorageConfig:
    chosen = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": True,
        "enable_storage_metrics": True,
        "is_page_first_layout": False,
        "model_name": str(model),
        "extra_config": extra,
        **changes,
    }
    return HiCacheStorageConfig(**chosen)


def attach(pool: MLATokenToKVPoolHost, config: HiCacheStorageConfig) -> Any:
    """As the controller does it."""
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend


def keys(tokens: Sequence[int], salt: str | None = None) -> list[str]:
    """SGLang's names of the pages."""
    return get_storage_hash_str(list(tokens), salt, page_size=PAGE)


def slots(pages: Sequence[int]) -> torch.Tensor:
    """Token slots of pages, as SGLang gives them."""
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).view(-1)


def write_page(pool: MLATokenToKVPoolHost, page: int, data: torch.Tensor) -> None:
    """``data [layers, PAGE, RANK + ROPE]`` by SGLang's own way into the pool."""
    ordered = data.transpose(0, 1) if pool.layout == "page_first" else data
    pool.set_from_flat_data_page(page * PAGE, ordered.contiguous().flatten())


def read_page(pool: MLATokenToKVPoolHost, page: int) -> torch.Tensor:
    """The inverse."""
    flat = pool.get_data_page(page * PAGE)
    if pool.layout == "page_first":
        return flat.view(PAGE, LAYERS, RANK + ROPE).transpose(0, 1)
    return flat.view(LAYERS, PAGE, RANK + ROPE)


def latents(page_keys: Sequence[str]) -> list[torch.Tensor]:
    """What the model would compute for each page: from its key, and so from its whole prefix."""
    return [
        torch.randn(
            LAYERS, PAGE, RANK + ROPE, generator=torch.Generator().manual_seed(int(key[:15], 16))
        ).bfloat16()
        for key in page_keys
    ]


@contextmanager
def controller(model: Path, order: str, extra: dict[str, Any]) -> Iterator[HiCacheController]:
    """A controller with its storage threads, over pools of its own."""
    device = device_pool()
    allocator = PagedTokenToKVPoolAllocator(
        PAGE * PAGES, PAGE, torch.bfloat16, "cpu", device, need_sort=False
    )
    ranks = {"tp_rank": 0, "pp_rank": 0, "attn_tp_rank": 0, "attn_dp_rank": 0, "attn_dcp_rank": 0}
    with get_parallel().override(**ranks):
        made = HiCacheController(
            allocator,
            host_pool(device, order),
            PAGE,
            torch.distributed.group.WORLD,
            threading.Event(),
            io_backend="direct",
            storage_backend="dynamic",
            model_name=str(model),
            storage_backend_extra_config=extra,
        )
    try:
        yield made
    finally:
        made.detach_storage_backend()
