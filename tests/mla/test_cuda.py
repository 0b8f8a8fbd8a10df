"""The paths that only an accelerator takes."""

import pytest
import torch

import mla
from mla import LatentCache, LatentPool
from mla.tiny import tiny_model
from tests.mla.zoo import forward, move_blocks, relative, tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none")


def test_blocks_go_through_staging_and_come_back():
    pool = LatentPool(mla.inspect_model(tiny_model()).layout, 80, device="cuda")
    blocks = pool.allocate(70)  # more than two staging batches
    data = [torch.randn(pool.layout.block_bytes // 4).numpy().tobytes() for _ in blocks]
    pool.write_blocks(blocks, [memoryview(d) for d in data])
    for block, want in zip(blocks, data, strict=True):
        out = bytearray(pool.layout.block_bytes)
        pool.read_block(block, memoryview(out))
        assert bytes(out) == want


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
