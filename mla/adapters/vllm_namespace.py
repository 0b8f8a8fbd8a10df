"""Namespace and layout from vLLM's own configuration, and what is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec, UniformTypeKVCacheSpecs

from kvstore.layout import DType, LatentLayout, Strip
from kvstore.namespace import Namespace
from mla.adapters.checkpoint import checkpoint_revision, entries_digest, loading
from mla.adapters.settings import Settings
from mla.adapters.vllm_plan import PAGE_TOKENS
from mla.errors import Unsupported
from mla.file_sums import checkpoint_fingerprint
from mla.rope import check_rope_length, engine_rope_layout, rope_json, rope_limit

_DTYPES = {"bfloat16": DType.BF16, "float16": DType.FP16, "float32": DType.FP32}
_CACHE_DTYPES = {"fp8": DType.FP8, "fp8_e4m3": DType.FP8, "fp8_ds_mla": DType.FP8_DS_MLA}


@dataclass(frozen=True)
class CacheShape:
    """How this server's cache is cut: ``layers`` in the order of a block's bytes."""

    layout: LatentLayout
    layers: tuple[str, ...]
    page_tokens: int


def cache_shape(config: VllmConfig, cache: KVCacheConfig) -> CacheShape:
    """Raises ``Unsupported`` for a cache that is not one group of MLA pages of 16, 32 or 64 tokens."""
    specs = _specs(cache)
    page_tokens = next(iter(specs.values())).block_size
    if page_tokens not in PAGE_TOKENS:
        raise Unsupported(f"--block-size {page_tokens}: latentkv serves {PAGE_TOKENS}")
    entry_bytes = {name: spec.real_page_size_bytes // page_tokens for name, spec in specs.items()}
    names = sorted(specs, key=extract_layer_index)
    text = config.model_config.hf_text_config.to_dict()
    rank, rope = text.get("kv_lora_rank"), text.get("qk_rope_head_dim")
    if not rank or rope is None:
        raise Unsupported(f"model type {text.get('model_type')!r} has no latent: not an MLA model")
    dtype = _dtype(config, next(iter(specs.values())))
    widest = LatentLayout(num_layers=1, latent_rank=rank, rope_dim=rope, dtype=dtype).entry_bytes
    entries = [name for name in names if entry_bytes[name] == widest]
    strips = [name for name in names if entry_bytes[name] != widest]
    layout = LatentLayout(
        num_layers=len(entries),
        latent_rank=rank,
        rope_dim=rope,
        dtype=dtype,
        strips=_strips(len(entries), [entry_bytes[name] for name in strips]),
    )
    return CacheShape(layout, (*entries, *strips), page_tokens)


def _specs(cache: KVCacheConfig) -> Mapping[str, MLAAttentionSpec]:
    if len(cache.kv_cache_groups) != 1:
        raise Unsupported(
            f"{len(cache.kv_cache_groups)} kinds of cache in one model: only models whose every layer keeps"
            " a latent are served"
        )
    (group,) = cache.kv_cache_groups
    spec = group.kv_cache_spec
    specs = (
        spec.kv_cache_specs
        if isinstance(spec, UniformTypeKVCacheSpecs)
        else dict.fromkeys(group.layer_names, spec)
    )
    for name, one in specs.items():
        if not isinstance(one, MLAAttentionSpec) or one.tokens_per_state != 1:
            raise Unsupported(f"layer {name} keeps a {type(one).__name__}, no latent for every token")
    return specs


def _strips(layers: int, entry_bytes: list[int]) -> tuple[Strip, ...]:
    """An indexer's keys: one strip of equal width a layer."""
    if not entry_bytes:
        return ()
    if len(entry_bytes) != layers or len(set(entry_bytes)) != 1:
        raise Unsupported(f"{len(entry_bytes)} indexer caches beside {layers} latent ones: no strip a layer")
    return (Strip("indexer", entry_bytes[0]),)


def _dtype(config: VllmConfig, spec: MLAAttentionSpec) -> DType:
    named = spec.cache_dtype_str or config.cache_config.cache_dtype
    if named == "auto":
        named = str(config.model_config.dtype).removeprefix("torch.")
    dtype = _CACHE_DTYPES.get(named) or _DTYPES.get(named)
    if dtype is None:
        raise Unsupported(f"--kv-cache-dtype {named}: latentkv knows {', '.join([*_DTYPES, *_CACHE_DTYPES])}")
    return dtype


def base_namespace(config: VllmConfig, layout: LatentLayout, settings: Settings) -> Namespace:
    """Everything on which this server's blocks depend, but for a request's adapter.

    The engine is part of the model's name: nobody has proven its latents equal to ours. Reads the
    checkpoint unless it is remembered, or named. Raises ``Unsupported`` for what cannot be shared right.
    """
    model = config.model_config
    text = model.hf_text_config.to_dict()
    check_rope_length(rope_limit(text), model.max_model_len)
    parts = {
        "weights": checkpoint_revision(model.model, model.revision, settings.revision),
        "loading": loading(config.load_config.load_format, config.load_config.model_loader_extra_config),
        "config": entries_digest(model.hf_config.to_dict()),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "draft": _draft(config),
    }
    return Namespace(
        layout=layout,
        model=f"vllm {Path(model.model).name}",
        revision=json.dumps(parts, sort_keys=True),
        tenant=settings.tenant,
        rope=rope_json(text),
        rope_layout=engine_rope_layout(text),
    )


def check_server(config: VllmConfig) -> None:
    """Raises ``Unsupported`` for a server that cannot be served right, whatever its model."""
    parallel = config.parallel_config
    for name, size in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise Unsupported(f"{name} {size}: every rank must hold every layer's latents of every token")
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_load_failure_policy != "recompute":
        raise Unsupported(
            'kv_load_failure_policy must be "recompute": with vLLM\'s default a block that cannot be read'
            " would fail its request"
        )


def _draft(config: VllmConfig) -> str:
    """A speculator's layers share the cache: its weights matter too."""
    speculative = config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return ""
    draft = speculative.draft_model_config
    return f"{checkpoint_revision(draft.model, draft.revision)} {entries_digest(draft.hf_config.to_dict())}"


class AdapterNames:
    """Names LoRA adapters by name and files, as they were when a number was first seen.

    vLLM loads an adapter once for its number, and afterwards nobody can tell from its files whether they
    or those of before are in use. So an adapter whose files have changed is served without us.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, str, int], str] = {}

    def __call__(self, name: str, path: str, number: int) -> str:
        """Raises ``Unsupported`` when its files are not here, or others than at first."""
        if not name:
            return ""
        directory = Path(path)
        if not directory.is_dir():
            raise Unsupported(f"adapter {name} at {path!r} has no directory to name its weights by")
        found = checkpoint_fingerprint(directory)
        if self._first.setdefault((name, path, number), found) != found:
            raise Unsupported(
                f"the files of adapter {name} at {path!r} have changed since it was first used: unload it and"
                " load it again, so that vLLM gives it another number"
            )
        return f"{name} {found}"
