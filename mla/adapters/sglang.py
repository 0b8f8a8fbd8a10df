"""SGLang's HiCache storage over a latentkv daemon: ``--hicache-storage-backend dynamic`` (docs/sglang.md).

SGLang names a page by a hash of all tokens up to its end; a page of 64 tokens is one of our
blocks. Its threads call us: what waits here waits beside the model.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
)
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvstore.api import Match, MissReason
from kvstore.hashing import HASH_BYTES, ROOT
from kvstore.layout import BLOCK_TOKENS
from mla.adapters.chains import Namespaces
from mla.adapters.host_pages import HostPages
from mla.adapters.settings import Settings
from mla.adapters.sglang_namespace import check_server, namespace, pool_layout
from mla.errors import Unsupported
from mla.guard import or_miss
from mla.prefix import check_order
from mla.storing import StoreQueue

Result = TypeVar("Result")

CALL_TIMEOUT = 2.0  # seconds that a call of the daemon may take
# What SGLang's loader reads of the extra config.
LOADER_NAMES = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})


class LatentHiCache(HiCacheStorage):
    """Raises ``Unsupported`` or ``InvalidArgument`` at attaching for a server it cannot serve right.

    ``batch_exists`` is one Match, ``batch_get_v1`` one Load into SGLang's pool, ``batch_set_v1``
    Reserve and Commit out of it. Every failure of the store is a miss, or a page not stored.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise Unsupported('the extra config needs "interface_v1": 1: without it SGLang names no prefix')
        check_server(storage_config)
        self._config = storage_config
        self._settings = Settings.parse({name: extra[name] for name in extra.keys() - LOADER_NAMES})
        self._store = self._settings.connect(CALL_TIMEOUT)
        self._namespaces = Namespaces(self._store)
        self._queue: StoreQueue[int] | None = None
        self._lock = threading.Lock()  # over what follows
        self._cleared = False
        self._counters: Counter[str] = Counter()
        self._metrics = StorageMetrics()

    def register_mem_pool_host(self, mem_pool_host: MLATokenToKVPoolHost) -> None:
        """The pool to copy from and to; the namespace follows from it."""
        super().register_mem_pool_host(mem_pool_host)
        layout = pool_layout(mem_pool_host)
        self._pages = HostPages(mem_pool_host.kv_buffer, mem_pool_host.layout, layout)
        self._namespace = namespace(self._config, layout, self._settings)
        if self._config.is_storage_writer:
            self._queue = StoreQueue(self._pages, self._store, deadline=self._settings.store_deadline)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """Only the latents' own pool; a second one beside it (an indexer's, a state's) is refused."""
        if host_pool_name != PoolName.KV:
            raise Unsupported(
                f"this model keeps a pool {host_pool_name} beside its latents, which latentkv does not store:"
                " a prefix without it is of no use, so attach another backend"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    @property
    def counters(self) -> Counter[str]:
        """Pages found, loaded and stored, and failures of the store by verb and kind."""
        with self._lock:
            return self._counters + (self._queue.counters() if self._queue is not None else Counter())

    # --- what SGLang asks

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many leading ``keys`` can be loaded: one Match over the whole prefix."""
        before, chain = _chain(keys, extra_info)
        # Each rank asks; and what lies before was asked for already, or never was the store's to give.
        counted = before if self._config.is_storage_writer else len(chain)
        found = self._guard("match", lambda: self._match(*self._named(chain), counted=counted).blocks, 0)
        hit = max(found - before, 0)
        self._count("found_pages", hit)
        return hit

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into the pool; which of them are there now."""
        before, chain = _chain(keys, extra_info)
        started = time.perf_counter()
        done = self._guard("load", lambda: self._load(chain, before, _pages(host_indices)), 0)
        self._measure(self._metrics.prefetch_pgs, self._metrics.prefetch_bandwidth, done, started)
        self._count("loaded_pages", done)
        return [index < done for index in range(len(keys))]

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages out of the pool; which of them are stored now. Only the writer of a group does."""
        before, chain = _chain(keys, extra_info)
        started = time.perf_counter()
        stored = self._guard("store", lambda: self._save(chain, before, _pages(host_indices)), before)
        self._measure(self._metrics.backup_pgs, self._metrics.backup_bandwidth, stored - before, started)
        self._count("stored_pages", stored - before)
        return [before + index < stored for index in range(len(keys))]

    def clear(self) -> None:
        """From now on nothing is found or stored, until SGLang attaches anew.

        The daemon's blocks are other servers' too and stay; they leave by eviction. Whatever is
        the reason to forget the past (new weights), this server does.
        """
        with self._lock:
            self._cleared = True

    def get_stats(self) -> StorageMetrics:
        """Pages and GB/s of each transfer since the last call, as SGLang's own backends report them."""
        with self._lock:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def close(self) -> None:
        """End the thread and the connection."""
        if self._queue is not None:
            self._queue.close(self._settings.store_deadline)
        self._store.close()

    # --- SGLang's older interface gives no prefix to find a page behind: everything is a miss

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """A miss."""

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Misses."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Not stored."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not stored."""
        return False

    def exists(self, key: str) -> bool:
        """Whether a first page can be loaded."""
        return self.batch_exists([key]) == 1

    # --- the verbs

    def _named(self, chain: Sequence[str]) -> tuple[bytes, list[bytes]]:
        """The namespace's digest, and the chain's hashes under it."""
        key = self._namespaces.digest(self._namespace)
        return key, [_block_hash(key, page) for page in chain]

    def _match(self, key: bytes, hashes: Sequence[bytes], *, store: bool = False, counted: int = 0) -> Match:
        # SGLang never asks for the page whose last token must be computed, so all of these may hit.
        tokens = len(hashes) * BLOCK_TOKENS + 1
        before = counted * BLOCK_TOKENS if counted < len(hashes) else tokens
        return self._store.match(key, hashes, tokens, store=store, counted=before)

    def _load(self, chain: Sequence[str], before: int, pages: Sequence[int]) -> int:
        """How many pages were loaded."""
        done = 0
        key, hashes = self._named(chain)
        # Each rank loads; the daemon counts one of them.
        counted = before if self._config.is_storage_writer else len(hashes)
        with self._store.load(
            key, hashes, first=before, timeout=self._settings.load_timeout, counted=counted
        ) as load:
            for batch in load:
                check_order(batch, before + done)
                for block in batch:
                    self._pages.write_block(pages[done], block.data)
                    done += 1
        return done

    def _save(self, chain: Sequence[str], before: int, pages: Sequence[int]) -> int:
        """Depth in blocks to which the chain is stored now."""
        if self._queue is None:
            return before
        key, hashes = self._named(chain)
        match = self._match(key, hashes, store=True, counted=len(hashes))
        if match.reason is MissReason.UNAVAILABLE:
            return before
        units = {point.tokens // BLOCK_TOKENS: point.kinds for point in match.persist_points}
        parent = hashes[before - 1] if before else ROOT
        job = self._queue.job(lambda: key, parent, before, epoch=match.epoch)
        job.add(hashes[before:], pages, units)
        job.finish()
        stored = job.wait(self._settings.store_deadline + 2 * CALL_TIMEOUT)
        job.drop()  # SGLang may give the pages to others once we return
        return stored

    def _guard(self, verb: str, work: Callable[[], Result], miss: Result) -> Result:
        """Whatever the store does wrong is a miss and a counter, never an error of SGLang's."""
        if self._cleared:
            return miss

        def failed(kind: str) -> None:
            self._count(f"{verb}_failed_{kind}", 1)
            self._namespaces.forget(self._namespace)  # the daemon may have another data directory now

        return or_miss(verb, work, miss, failed)

    def _count(self, name: str, times: int) -> None:
        with self._lock:
            self._counters[name] += times

    def _measure(self, pages: list[int], bandwidths: list[float], moved: int, started: float) -> None:
        seconds = time.perf_counter() - started
        with self._lock:
            if moved and self._config.enable_storage_metrics:
                pages.append(moved)
                bandwidths.append(moved * self._namespace.layout.block_bytes / seconds / 1e9)


def _chain(keys: list[str], extra_info: HiCacheStorageExtraInfo | None) -> tuple[int, list[str]]:
    """Pages before ``keys``, and all pages from the first token on."""
    prefix = (extra_info.prefix_keys or []) if extra_info is not None else []
    return len(prefix), prefix + keys


def _pages(host_indices: torch.Tensor) -> list[int]:
    """Pages of the pool, from the token slots that SGLang gives; a page's slots are consecutive."""
    return [int(slot) // BLOCK_TOKENS for slot in host_indices[::BLOCK_TOKENS]]


def _block_hash(key: bytes, page: str) -> bytes:
    """SGLang's key stands for the whole prefix already; the namespace's digest keeps others out."""
    return hashlib.blake2b(page.encode(), key=key, digest_size=HASH_BYTES).digest()
