"""Namespace and layout from SGLang's host pool and server arguments, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import get_lora, get_model, get_spec

from kvstore.layout import BLOCK_TOKENS, DType, LatentLayout
from kvstore.namespace import Namespace
from mla.adapters.checkpoint import (
    checkpoint_directory,
    checkpoint_revision,
    entries_digest,
    file_revision,
    loading,
)
from mla.adapters.settings import Settings
from mla.errors import Unsupported
from mla.rope import engine_rope_layout, rope_json, rope_limit

_DTYPES = {
    torch.bfloat16: DType.BF16,
    torch.float16: DType.FP16,
    torch.float32: DType.FP32,
    torch.float8_e4m3fn: DType.FP8,
    torch.uint8: DType.FP8,  # how SGLang's pools keep fp8
}


def check_server(config: HiCacheStorageConfig) -> None:
    """Raises ``Unsupported`` for a server whose ranks do not hold whole latents of whole pages."""
    if not config.is_mla_model:
        raise Unsupported("not an MLA model: its cache has no latents")
    for name, size in (("--dcp-size", config.dcp_size), ("--attn-cp-size", config.attn_cp_size)):
        if size > 1:
            raise Unsupported(f"{name} {size}: every rank must hold every token's latents of its layers")


def pool_layout(pool: MLATokenToKVPoolHost) -> LatentLayout:
    """What a page of the pool holds. Raises ``Unsupported`` for pages that are no blocks of ours."""
    if not isinstance(pool, MLATokenToKVPoolHost):
        raise Unsupported(f"a host pool of type {type(pool).__name__}: only SGLang's MLA pool is known")
    if pool.page_size != BLOCK_TOKENS:
        raise Unsupported(f"--page-size {pool.page_size}: use --page-size {BLOCK_TOKENS}")
    dtype = DType.FP8_DS_MLA if pool.dsa_kv_cache_store_fp8 else _DTYPES.get(pool.dtype)
    if dtype is None:
        raise Unsupported(f"a cache of dtype {pool.dtype}: latentkv knows {', '.join(map(str, _DTYPES))}")
    layout = LatentLayout(
        num_layers=pool.layer_num,
        latent_rank=pool.kv_lora_rank,
        rope_dim=pool.qk_rope_head_dim,
        dtype=dtype,
        first_layer=pool.start_layer or 0,
    )
    if layout.entry_bytes != pool.token_stride_size:
        raise Unsupported(f"entries of {pool.token_stride_size} bytes; {dtype} has {layout.entry_bytes}")
    return layout


def namespace(config: HiCacheStorageConfig, layout: LatentLayout, settings: Settings) -> Namespace:
    """Everything on which this server's pages depend, but for what SGLang's own keys hold.

    Those keys are seeded with a request's ``extra_key`` (its adapter) and ``cache_salt``. An adapter that
    is loaded later has a random id there; one of ``--lora-paths`` has its name and path alone. The
    engine is part of the model's name: nobody has proven its latents equal to others'.
    Raises ``Unsupported``.
    """
    server, spec, model = get_model(), get_spec(), str(config.model_name)
    entries = json.loads((checkpoint_directory(model, server.revision) / "config.json").read_text())
    if rope_limit(entries) is not None:
        raise Unsupported("longrope: keys cached before its original length are wrong for longer requests")
    draft = spec.speculative_draft_model_path
    parts = {
        "weights": checkpoint_revision(model, server.revision, settings.revision),
        "loading": loading(server.load_format, server.model_loader_extra_config),
        "config": entries_digest(entries),
        "overrides": server.json_model_override_args,
        "quantization": str(server.quantization),
        "dtype": str(server.dtype),
        "cache": f"{server.kv_cache_dtype} {file_revision(server.quantization_param_path)}",
        "draft": checkpoint_revision(draft, spec.speculative_draft_model_revision) if draft else "",
        "adapters": _adapters(),
    }
    return Namespace(
        layout=layout,
        model=f"sglang {Path(model).name}",
        revision=json.dumps(parts, sort_keys=True),
        tenant=settings.tenant,
        rope=rope_json(entries),
        rope_layout=engine_rope_layout(entries),
    )


def _adapters() -> list[str]:
    """The adapters of ``--lora-paths`` by name and files."""
    return sorted(
        f"{adapter.lora_name} {checkpoint_revision(adapter.lora_path, None)}"
        for adapter in get_lora().lora_paths or ()
    )
