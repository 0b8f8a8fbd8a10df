"""Four ranks of one vLLM server, each a process, over a daemon whose arena is smaller than the document."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not in this environment: make test-engines")

from kvstore.layout import BLOCK_TOKENS
from tests.engines.checkpoint import checkpoint
from tests.engines.vllm_engine import Engine, Truth
from tests.engines.vllm_ranks import Ranks
from tests.server.conftest import DaemonProcess, Fleet

RANKS = 4
BLOCKS = 5632  # 69 MB, through an arena of 64 MiB
TOKENS = BLOCKS * BLOCK_TOKENS


@pytest.fixture
def daemon(fleet: Fleet, flags: Callable[..., list[str]]) -> DaemonProcess:
    return fleet.daemon(*flags())


@pytest.fixture
def engine(daemon: DaemonProcess, tmp_path: Path) -> Iterator[Engine]:
    model = checkpoint(tmp_path / "model")
    changes = {"chunk": TOKENS + 64, "length": TOKENS + 64, "num_blocks": BLOCKS + 8}
    ranks = Ranks(RANKS, tmp_path / "meeting", daemon.url, model, 64, **changes)
    with closing(ranks):
        made = Engine(daemon.url, model, block_size=64, ranks=RANKS, make_worker=lambda *_: ranks, **changes)
        yield made
        made.scheduler.shutdown()


def test_the_first_rank_stores_and_all_load_while_the_disk_is_read_once(
    engine: Engine, daemon: DaemonProcess, fleet: Fleet
) -> None:
    ranks: Ranks = engine.worker
    text = random.Random(0).choices(range(1000), k=TOKENS)
    (right,) = Truth().answer(text, 1)
    assert engine.serve("a", text, 1) == [right]
    assert [rank["stored_blocks"] for rank in ranks.counters()] == [BLOCKS, 0, 0, 0]

    assert daemon.term() == 0
    daemon.start()
    assert engine.scheduler.reset_prefix_cache()
    ranks.wipe()
    assert engine.serve("b", text, 1) == [right]
    assert [rank["loaded_blocks"] for rank in ranks.counters()] == [BLOCKS] * RANKS
    counters = fleet.connect(daemon.url).status().counters
    assert counters["disk_read_blocks"] == BLOCKS
    assert "readers_left_behind" not in counters
    assert engine.used_blocks == 0
