"""To the bit: equal splits give equal logits, wherever the prefix came from."""

import pytest
import torch

import mla
from mla import LatentCache, LatentPool
from mla.tiny import tiny_model
from tests.mla.zoo import forward, move_blocks, tokens

TOTAL = 1100  # more than one chunk of context


@pytest.fixture(params=[torch.float32, torch.bfloat16], scope="module")
def model(request):
    model = tiny_model(dtype=request.param)  # its first layer is dense, the others are MoE
    mla.attach(model)
    return model


def chunks(model, ids, cache, size):
    start = cache.tokens
    return [forward(model, ids[:, i : i + size], cache) for i in range(start, ids.shape[1], size)]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("model", [torch.bfloat16], indirect=True)
def test_logits_are_bit_identical_on_several_threads_too(model, two_threads):
    test_logits_are_bit_identical_for_hits_at_every_multiple_of_the_chunk(model, 512)


@pytest.mark.parametrize("size", [128, 256])  # the absorbed and the expanded form
def test_logits_are_bit_identical_for_hits_at_every_multiple_of_the_chunk(model, size):
    ids = tokens(TOTAL, vocab=256)
    pool = LatentPool(mla.attach(model).layout, 64)
    with LatentCache(pool) as cold:
        want = chunks(model, ids, cold, size)
        last = [forward(model, ids[:, :1], cold)]
        table = cold.block_table()
        for hit in range(size, TOTAL, size):
            blocks = move_blocks(pool, table[: hit // 64])
            with LatentCache.from_prefix(pool, blocks, hit) as warm:
                got = chunks(model, ids, warm, size)
                assert all(map(torch.equal, got, want[hit // size :]))
                assert torch.equal(forward(model, ids[:, :1], warm), last[0])


def test_one_flipped_block_changes_the_logits(model):
    ids = tokens(1024, vocab=256)
    pool = LatentPool(mla.attach(model).layout, 40)
    with LatentCache(pool) as cache:
        want = chunks(model, ids, cache, 256)[-1]
        blocks = move_blocks(pool, cache.block_table()[:12])
    data = bytearray(pool.layout.block_bytes)
    pool.read_blocks([blocks[1]], [memoryview(data)], pool.mark())
    pool.write_block(blocks[1], memoryview(bytes(byte ^ 0x80 for byte in data)))
    with LatentCache.from_prefix(pool, blocks, 768) as cache:
        got = forward(model, ids[:, 768:], cache)
    assert not torch.equal(got, want)
    assert float((got - want).abs().max()) > 0.1 * float(want.std())
