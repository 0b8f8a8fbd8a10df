"""Four ranks of one SGLang server, each a process with a host pool and a backend of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="sglang is not in this environment: make test-engines")

from tests.engines import sglang_engine as engine

# isort: split
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from sglang.srt.runtime_context import get_context

from tests.engines.checkpoint import checkpoint
from tests.engines.ranks import RankProcesses
from tests.server.conftest import Fleet

RANKS = 4
PAGES = 32


class _Rank:
    def __init__(self, rank: int, url: str, model: Path, keys: list[str]) -> None:
        torch.set_num_threads(1)
        self._keys, self._latents = keys, engine.latents(keys)
        with get_context().override_server_args(model_path=str(model), device="cpu"):
            self._pool = engine.host_pool(engine.device_pool(), "page_first_direct")
            config = engine.storage_config(model, engine.extra_config(url), tp_rank=rank, tp_size=RANKS)
            self._backend = engine.attach(self._pool, config)
        self._slots = engine.slots(range(PAGES))
        self._info = HiCacheStorageExtraInfo(prefix_keys=[])

    def store(self) -> int:
        """Pages that this rank stored."""
        for page, data in enumerate(self._latents):
            engine.write_page(self._pool, page, data)
        return sum(self._backend.batch_set_v1(self._keys, self._slots, self._info))

    def load(self) -> int:
        """Pages that came, each with the right bytes."""
        self._pool.kv_buffer.view(torch.uint8).fill_(0xEE)
        loaded = self._backend.batch_get_v1(self._keys, self._slots, self._info)
        for page, data in enumerate(self._latents):
            assert torch.equal(engine.read_page(self._pool, page), data)
        return sum(loaded)

    def close(self) -> None:
        self._backend.close()


def test_the_first_rank_stores_and_all_load_while_the_disk_is_read_once(
    fleet: Fleet, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    daemon = fleet.daemon(*flags())
    keys = engine.keys(random.Random(0).choices(range(1000), k=PAGES * engine.PAGE))
    ranks = RankProcesses(RANKS, _Rank, daemon.url, checkpoint(tmp_path / "model"), keys)
    assert ranks.ask("store") == [PAGES, 0, 0, 0]
    assert daemon.term() == 0
    daemon.start()
    assert ranks.ask("load") == [PAGES] * RANKS
    assert fleet.connect(daemon.url).status().counters["disk_read_blocks"] == PAGES
    ranks.close()
