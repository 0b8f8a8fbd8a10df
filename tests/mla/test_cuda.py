"""The paths that only an accelerator takes."""

import mmap
import os

import pytest
import torch

import mla
from kvstore.memory import allocate_shared
from mla import LatentCache, LatentPool
from mla.registration import cuda_registration
from mla.tiny import tiny_model
from tests.mla.zoo import forward, move_blocks, relative, tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none")


def small_pool(monkeypatch, blocks: int) -> LatentPool:
    layout = mla.inspect_model(tiny_model()).layout
    monkeypatch.setattr("mla.transfer.STAGING_BYTES", 3 * layout.block_bytes)
    return LatentPool(layout, blocks, device="cuda")


def test_blocks_go_through_staging_and_come_back(monkeypatch):
    pool = small_pool(monkeypatch, 80)
    blocks = pool.allocate(70)  # many staging batches
    data = [os.urandom(pool.layout.block_bytes) for _ in blocks]
    pool.write_blocks(blocks, [memoryview(d) for d in data])
    outs = [bytearray(pool.layout.block_bytes) for _ in blocks]
    pool.read_blocks(blocks, [memoryview(out) for out in outs], pool.mark())
    assert outs == data


def test_an_arena_is_registered_and_copied_by_dma_both_ways(monkeypatch):
    pool = small_pool(monkeypatch, 40)
    nbytes = pool.layout.block_bytes
    fd, arena = allocate_shared(40 * nbytes // mmap.PAGESIZE * mmap.PAGESIZE)
    views = [memoryview(arena)[i * nbytes : (i + 1) * nbytes] for i in range(32)]
    data = [os.urandom(nbytes) for _ in views]
    for view, want in zip(views, data, strict=True):
        view[:] = want
    blocks = pool.allocate(32)
    pool.write_blocks(blocks[:1], views[:1])
    cuda_registration.join()
    assert torch.frombuffer(arena, dtype=torch.uint8).is_pinned()
    pool.write_blocks(blocks[1:], views[1:])
    for view in views:
        view[:] = bytes(nbytes)
    pool.read_blocks(blocks, views, pool.mark())
    assert [bytes(view) for view in views] == data
    os.close(fd)


def test_what_was_computed_before_is_read_and_what_is_loaded_is_computed_with(monkeypatch):
    pool = small_pool(monkeypatch, 32)
    blocks = pool.allocate(16)
    heavy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):  # keeps the stream busy while the copies are asked for
        heavy = heavy @ heavy / 4096
    pool.data[:, blocks] = 1.0 + 0.0 * heavy[0, 0].to(pool.data.dtype).nan_to_num()
    outs = [bytearray(pool.layout.block_bytes) for _ in blocks]
    pool.read_blocks(blocks, [memoryview(out) for out in outs], pool.mark())
    ones = torch.ones((), dtype=pool.data.dtype).expand(pool.layout.block_bytes // 2).contiguous()
    assert all(bytes(out) == ones.view(torch.uint8).numpy().tobytes() for out in outs)
    other = pool.allocate(16)
    pool.write_blocks(other, [memoryview(out) for out in outs])
    assert float(pool.data[:, other].float().sum()) == 16 * pool.layout.block_bytes / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attached_on_a_gpu_equals_stock_and_a_loaded_prefix_is_bit_identical(dtype):
    model = tiny_model(dtype=dtype).cuda()
    ids = tokens(1500, vocab=256).cuda()
    stock = forward(model, ids)
    pool = LatentPool(mla.attach(model).layout, 64, device="cuda")
    with LatentCache(pool) as cold:
        want = [forward(model, part, cold) for part in ids.split(512, dim=1)]
        blocks = move_blocks(pool, cold.block_table()[:16])
    with LatentCache.from_prefix(pool, blocks, 1024) as warm:
        assert torch.equal(forward(model, ids[:, 1024:], warm), want[2])
    if dtype == torch.float32:
        assert relative(torch.cat(want, dim=1), stock) <= 1e-4
