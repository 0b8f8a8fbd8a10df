"""SGLang's own storage factory, host pool and controller with our backend, against a real daemon."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="sglang is not in this environment: make test-engines")

import torch

from kvstore.errors import InvalidArgument
from mla.errors import Unsupported
from server.commands.daemon import Operator
from tests.engines import sglang_engine as engine
from tests.server.conftest import DaemonProcess, Fleet

ORDERS = ["layer_first", "page_first", "page_first_direct"]


@pytest.fixture(autouse=True)
def model(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint, and the server's arguments that name it."""
    from sglang.srt.runtime_context import get_context

    from tests.engines.checkpoint import checkpoint

    path = checkpoint(tmp_path / "model")
    with get_context().override_server_args(model_path=str(path), device="cpu"):
        yield path


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[None]:
    """Process groups, of one rank."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def daemon(fleet: Fleet, flags: Callable[..., list[str]]) -> DaemonProcess:
    return fleet.daemon(*flags())


@pytest.fixture
def attach(daemon: DaemonProcess, model: Path) -> Iterator[Callable[..., Any]]:
    """Attaches a server with an empty host pool of some order to the daemon."""
    backends: list[Any] = []

    def make(
        order: str = "layer_first",
        *,
        path: Path = model,
        extra: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Any:
        pool = engine.host_pool(engine.device_pool(), order)
        config = engine.storage_config(path, engine.extra_config(daemon.url, **(extra or {})), **changes)
        backend = engine.attach(pool, config)
        backends.append(backend)
        return backend

    yield make
    daemon.process.send_signal(signal.SIGCONT)
    for backend in backends:
        backend.close()


def document(pages: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=pages * engine.PAGE)


def info(prefix: list[str] | None = None) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    return HiCacheStorageExtraInfo(prefix_keys=prefix)


def store(backend: Any, keys: list[str], prefix: list[str] | None = None) -> list[bool]:
    """Put what the model computed into pages of the pool, and store them."""
    places = list(range(3, 3 + len(keys)))
    for page, data in zip(places, engine.latents(keys), strict=True):
        engine.write_page(backend.mem_pool_host, page, data)
    return backend.batch_set_v1(keys, engine.slots(places), info(prefix))


def load(backend: Any, keys: list[str], prefix: list[str] | None = None) -> int:
    """Load into other pages of the pool, compare each byte, and give the number of pages."""
    places = list(range(30 - len(keys), 30))[::-1]
    results = backend.batch_get_v1(keys, engine.slots(places), info(prefix))
    count = results.index(False) if False in results else len(results)
    assert not any(results[count:])
    for page, data in zip(places[:count], engine.latents(keys), strict=False):
        assert torch.equal(engine.read_page(backend.mem_pool_host, page), data)
    return count


@pytest.mark.parametrize("writer", ORDERS)
@pytest.mark.parametrize("reader", ORDERS)
def test_pages_go_from_any_order_to_any_other(attach: Callable[..., Any], writer: str, reader: str) -> None:
    keys = engine.keys(document(10))
    first, second = attach(writer), attach(reader)
    assert first.batch_exists(keys, info()) == 0
    assert all(store(first, keys))
    assert second.batch_exists(keys, info()) == 10
    assert load(second, keys) == 10


def test_pages_behind_a_prefix_are_found_and_loaded(attach: Callable[..., Any]) -> None:
    keys = engine.keys(document(12))
    first, second = attach(), attach()
    assert all(store(first, keys[:5]))
    assert all(store(first, keys[5:], keys[:5]))
    assert second.batch_exists(keys[3:], info(keys[:3])) == 9
    assert load(second, keys[3:], keys[:3]) == 9


def test_what_two_documents_share_is_found(attach: Callable[..., Any]) -> None:
    system = document(6)
    first, second = attach(), attach()
    for seed in (1, 2):
        assert all(store(first, engine.keys(system + document(4, seed))))
    assert second.batch_exists(engine.keys(system + document(4, 3)), info()) == 6


def test_pages_outlive_the_daemon(attach: Callable[..., Any], daemon: DaemonProcess) -> None:
    keys = engine.keys(document(10))
    store(attach(), keys)
    assert daemon.term() == 0
    daemon.start()
    assert load(attach(), keys) == 10


def test_an_adapter_of_the_command_line_is_named_by_its_files(
    attach: Callable[..., Any], tmp_path: Path
) -> None:
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.runtime_context import get_context

    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(b"one")
    name = LoRARef.deterministic_id("a", str(path))  # SGLang's own, which knows no file
    keys = engine.keys(document(6))
    adapter = LoRARef(lora_id=name, lora_name="a", lora_path=str(path), pinned=False)
    with get_context().override_server_args(device="cpu", lora_paths=[adapter]):
        store(attach(), keys)
        assert attach().batch_exists(keys, info()) == 6
        (path / "adapter_config.json").write_text('{"lora_alpha": 16}')
        assert attach().batch_exists(keys, info()) == 0


@pytest.mark.parametrize("difference", ["salt", "weights", "tenant", "arguments", "made up weights"])
def test_servers_and_requests_that_differ_never_share(
    attach: Callable[..., Any], tmp_path: Path, difference: str
) -> None:
    from sglang.srt.mem_cache.utils import storage_namespace_seed
    from sglang.srt.runtime_context import get_context

    from tests.engines.checkpoint import checkpoint

    tokens = document(6)
    keys = engine.keys(tokens, storage_namespace_seed("adapter", "one"))
    store(attach(), keys)
    if difference == "salt":
        other = attach()
        keys = engine.keys(tokens, storage_namespace_seed("adapter", "two"))
    elif difference == "weights":
        other = attach(path=checkpoint(tmp_path / "other" / "model", b"other weights"))
    elif difference == "tenant":
        other = attach(extra={"tenant": "other"})
    else:
        overrides = {"device": "cpu"} | (
            {"json_model_override_args": '{"rope_theta": 5}'}
            if difference == "arguments"
            else {"load_format": "dummy"}
        )
        with get_context().override_server_args(**overrides):
            other = attach()
    assert other.batch_exists(keys, info()) == 0
    assert load(other, keys) == 0
    assert attach().batch_exists(engine.keys(tokens, storage_namespace_seed("adapter", "one")), info()) == 6


def test_a_request_is_counted_once_however_often_it_is_asked_for(
    daemon: DaemonProcess, attach: Callable[..., Any]
) -> None:
    keys = engine.keys(document(6))
    ranks = [attach(tp_rank=rank, tp_size=2) for rank in range(2)]
    store(ranks[0], keys[:2])
    store(ranks[0], keys[2:4], keys[:2])
    for each in ranks:  # by pieces, as SGLang's prefetch asks, on every rank
        assert [each.batch_exists(keys[:2], info()), each.batch_exists(keys[2:], info(keys[:2]))] == [2, 2]
    store(ranks[0], keys[4:], keys[:4])
    with Operator(daemon.url) as operator:
        totals = operator.report()["totals"]
    assert (totals["matches"], totals["matched_tokens"]) == (1, 4 * engine.PAGE)


def test_only_the_writer_of_a_group_stores_and_all_ranks_load(attach: Callable[..., Any]) -> None:
    keys = engine.keys(document(6))
    ranks = [attach(tp_rank=rank, tp_size=4) for rank in range(4)]
    assert not any(store(ranks[1], keys))
    assert ranks[2].batch_exists(keys, info()) == 0
    assert all(store(ranks[0], keys))
    assert [load(rank, keys) for rank in ranks] == [6] * 4


@pytest.mark.parametrize("order", ORDERS)
def test_the_controller_backs_up_and_prefetches(
    daemon: DaemonProcess, model: Path, order: str, groups: None
) -> None:
    """SGLang's controller with its threads: backup out of one pool, prefetch into another."""
    tokens = document(12)
    keys = engine.keys(tokens)
    extra = engine.extra_config(daemon.url)
    with engine.controller(model, order, extra) as writer:
        places = list(range(5, 17))
        for page, data in zip(places, engine.latents(keys), strict=True):
            engine.write_page(writer.mem_pool_host, page, data)
        writer.write_storage(engine.slots(places), tokens, keys, [])
        done = writer.ack_backup_queue.get(timeout=30)
        assert done.completed_tokens == len(tokens)
    with engine.controller(model, order, extra) as reader:
        operation = reader.prefetch("request", tokens + document(1, 9), None, [])
        hit = reader.prefetch_hit_queue.get(timeout=30)
        assert hit is operation
        assert hit.storage_hit_count == len(tokens)
        operation.host_indices = reader.alloc_prefetch_host_buffers(operation, len(tokens))
        reader.prefetch_buffer.put(operation)
        acks = [reader.ack_prefetch_queue.get(timeout=30) for _ in range(2)]
        assert acks[0].completed_tokens == len(tokens)
        assert acks[1].completed_req
        loaded = [int(slot) // engine.PAGE for slot in operation.host_indices[:: engine.PAGE]]
        for page, data in zip(loaded, engine.latents(keys), strict=True):
            assert torch.equal(engine.read_page(reader.mem_pool_host, page), data)


def test_a_corrupt_page_ends_the_load_before_it(
    attach: Callable[..., Any], daemon: DaemonProcess, flags: Callable[..., list[str]]
) -> None:
    from tests.engines.checkpoint import damage

    data = Path(flags()[flags().index("--data") + 1])

    keys = engine.keys(document(10))
    store(attach(), keys)
    assert daemon.term() == 0
    damage(data, engine.latents(keys)[4].view(torch.uint8).numpy().tobytes())
    daemon.start()
    reader = attach()
    assert load(reader, keys) == 4
    assert all(store(attach(), keys))
    assert load(attach(), keys) == 10


def test_a_daemon_that_is_gone_is_a_miss(attach: Callable[..., Any], daemon: DaemonProcess) -> None:
    keys = engine.keys(document(10))
    backend = attach()
    store(backend, keys)
    daemon.kill()
    assert backend.batch_exists(keys, info()) == 0
    assert load(backend, keys) == 0
    assert not any(store(backend, keys))
    daemon.start()
    assert all(store(backend, keys))
    assert load(backend, keys) == 10


def test_after_a_clear_nothing_is_found_or_stored_until_attached_anew(
    attach: Callable[..., Any],
) -> None:
    keys = engine.keys(document(4))
    backend = attach()
    store(backend, keys)
    backend.clear()
    assert backend.batch_exists(keys, info()) == 0
    assert load(backend, keys) == 0
    assert not any(store(backend, keys))
    assert load(attach(), keys) == 4


def test_what_was_moved_is_in_the_stats(attach: Callable[..., Any]) -> None:
    keys = engine.keys(document(4))
    backend = attach()
    store(backend, keys)
    load(backend, keys)
    stats = backend.get_stats()
    assert stats.backup_pgs == stats.prefetch_pgs == [4]
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert backend.get_stats().backup_pgs == []


def test_the_older_interface_is_a_miss(attach: Callable[..., Any]) -> None:
    keys = engine.keys(document(2))
    backend = attach()
    store(backend, keys)
    assert backend.get(keys[0]) is None
    assert backend.batch_get(keys) == [None, None]
    assert backend.set(keys[0], b"") is False
    assert backend.batch_set(keys, [b"", b""]) is False


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"extra": {"interface_v1": 0}}, Unsupported, "interface_v1"),
        ({"extra": {"speed": 1}}, InvalidArgument, "speed"),
        ({"is_mla_model": False}, Unsupported, "not an MLA model"),
        ({"attn_cp_size": 2}, Unsupported, "--attn-cp-size 2"),
        ({"path": Path("/nowhere")}, Unsupported, "/nowhere"),
    ],
)
def test_what_cannot_be_served_right_is_refused_at_attaching(
    attach: Callable[..., Any], changes: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        attach(**changes)


def test_a_second_pool_beside_the_latents_is_refused(attach: Callable[..., Any]) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    backend = attach()
    backend.register_mem_host_pool_v2(backend.mem_pool_host, PoolName.KV)
    with pytest.raises(Unsupported, match="indexer"):
        backend.register_mem_host_pool_v2(backend.mem_pool_host, PoolName.INDEXER)
