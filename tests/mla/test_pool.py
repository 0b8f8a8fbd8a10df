"""The pool against a model of it, and its refusals."""

import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from kvstore.errors import InvalidArgument
from kvstore.layout import DType, LatentLayout, Strip
from mla import LatentPool, PoolFull, Unsupported

LAYOUT = LatentLayout(num_layers=2, latent_rank=6, rope_dim=2, block_tokens=16)
BLOCKS = 6


def content(seed: int) -> memoryview:
    return memoryview(bytes((seed * 31 + i) % 251 for i in range(LAYOUT.block_bytes)))


def read(pool: LatentPool, block: int) -> bytes:
    out = bytearray(LAYOUT.block_bytes)
    pool.read_blocks([block], [memoryview(out)], pool.mark())
    return bytes(out)


class PoolMachine(RuleBasedStateMachine):
    """``held`` and ``hashed`` say what must be true; ``idle`` is the LRU, oldest first."""

    hashes = Bundle("hashes")

    def __init__(self):
        super().__init__()
        self.pool = LatentPool(LAYOUT, BLOCKS)
        self.held: dict[int, int] = {}
        self.hashed: dict[bytes, int] = {}
        self.idle: list[int] = []
        self.bytes: dict[int, memoryview] = {}

    def free_count(self):
        return BLOCKS - len(self.held) - len(self.idle)

    def hash_of(self, block):
        return next((h for h, b in self.hashed.items() if b == block), None)

    @rule(count=st.integers(0, 4), seed=st.integers(0, 250))
    def allocate(self, count, seed):
        if count > self.free_count() + len(self.idle):
            before = (self.pool.available, self.pool.lookup_run(list(self.hashed)))
            with pytest.raises(PoolFull, match=f"{count} blocks wanted"):
                self.pool.allocate(count)
            assert (self.pool.available, self.pool.lookup_run(list(self.hashed))) == before
            return
        evicted = self.idle[: max(count - self.free_count(), 0)]
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert set(evicted) <= set(blocks)
        for block in blocks:
            assert block not in self.held
            self.held[block] = 1
            self.hashed.pop(self.hash_of(block), None)
            if block in self.idle:
                self.idle.remove(block)
            self.bytes[block] = content(seed + block)
        self.pool.write_blocks(blocks, [self.bytes[b] for b in blocks])

    @rule(target=hashes, name=st.binary(min_size=1, max_size=1))
    def new_hash(self, name):
        return name * 32

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=hashes)
    def register(self, data, name):
        block = data.draw(st.sampled_from(sorted(self.held)))
        fits = name not in self.hashed and self.hash_of(block) is None
        assert self.pool.register(block, name, self.namespace(name)) == fits
        if fits:
            self.hashed[name] = block

    @rule(name=hashes)
    def acquire(self, name):
        block = self.pool.acquire(name)
        assert block == self.hashed.get(name)
        if block is not None:
            self.held[block] = self.held.get(block, 0) + 1
            if block in self.idle:
                self.idle.remove(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retain(self, data):
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=4))
        self.pool.retain(blocks)
        for block in blocks:
            self.held[block] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=3, unique=True))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                if self.hash_of(block):
                    self.idle.append(block)

    @rule(name=hashes)
    def evict(self, name):
        self.pool.evict([name])
        block = self.hashed.pop(name, None)
        if block in self.idle:
            self.idle.remove(block)

    @staticmethod
    def namespace(name):
        return bytes([name[0] % 2])

    @rule(namespace=st.sampled_from([b"\0", b"\1"]))
    def forget(self, namespace):
        names = [name for name in self.hashed if self.namespace(name) == namespace]
        assert self.pool.forget(namespace) == len(names)
        for name in names:
            block = self.hashed.pop(name)
            if block in self.idle:
                self.idle.remove(block)

    @rule()
    def clear(self):
        self.pool.clear()
        self.hashed.clear()
        self.idle.clear()

    @invariant()
    def counts_agree(self):
        assert self.pool.available == BLOCKS - len(self.held)
        for block in range(BLOCKS):
            assert self.pool.references(block) == self.held.get(block, 0)
        for block in self.held:
            assert self.pool.is_private(block) == (self.held[block] == 1 and self.hash_of(block) is None)
            assert read(self.pool, block) == self.bytes[block]
        for name, block in self.hashed.items():
            assert self.pool.lookup_run([name, b"never"]) == 1
            assert block in self.held or block in self.idle


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_a_released_sequence_loses_its_last_blocks_first():
    pool = LatentPool(LAYOUT, 3)
    blocks = pool.allocate(3)
    for index, block in enumerate(blocks):
        pool.register(block, bytes([index]) * 32)
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.lookup_run([bytes([i]) * 32 for i in range(3)]) == 2


def test_the_older_of_two_blocks_with_one_hash_is_kept():
    pool = LatentPool(LAYOUT, 2)
    old, new = pool.allocate(2)
    assert pool.register(old, b"h" * 32)
    assert not pool.register(new, b"h" * 32)
    assert pool.acquire(b"h" * 32) == old


def test_block_bytes_are_layer_major_and_land_in_the_pool_tensor():
    pool = LatentPool(LatentLayout(num_layers=2, latent_rank=2, rope_dim=1, dtype=DType.FP32), 3)
    block = pool.allocate(2)[1]
    want = torch.arange(2 * 64 * 3, dtype=torch.float32).view(2, 64, 3)
    pool.write_block(block, memoryview(want.numpy().tobytes()))
    assert torch.equal(pool.data[:, block], want)


def test_shared_registered_and_free_blocks_are_never_written():
    pool = LatentPool(LAYOUT, 3)
    shared, registered = pool.allocate(2)
    pool.retain([shared])
    pool.register(registered, b"h" * 32)
    for block in (shared, registered, 2):
        with pytest.raises(InvalidArgument, match=f"block {block} is not private"):
            pool.write_block(block, content(1))


def test_misuse_is_refused_and_changes_nothing():
    pool = LatentPool(LAYOUT, 2)
    (block,) = pool.allocate(1)
    with pytest.raises(InvalidArgument, match="released 2 times"):
        pool.release([block, block])
    with pytest.raises(InvalidArgument, match="not referenced"):
        pool.retain([block, 1 - block])
    with pytest.raises(InvalidArgument, match="not referenced"):
        pool.register(1 - block, b"h" * 32)
    with pytest.raises(InvalidArgument, match="outside the pool"):
        pool.retain([2])
    with pytest.raises(InvalidArgument, match=r"a buffer of 3 bytes; a block of this layout has 512"):
        pool.write_block(block, memoryview(b"abc"))
    with pytest.raises(InvalidArgument, match="1 blocks but 2 buffers"):
        pool.write_blocks([block], [content(1), content(2)])
    with pytest.raises(InvalidArgument, match="not referenced"):
        read(pool, 1 - block)
    assert pool.references(block) == 1


@pytest.mark.parametrize(
    "layout",
    [
        LatentLayout(num_layers=1, dtype=DType.FP8_DS_MLA),
        LatentLayout(num_layers=1, strips=(Strip("indexer", 128),)),
    ],
)
def test_layouts_that_the_attention_cannot_compute_with_are_refused(layout):
    with pytest.raises(Unsupported):
        LatentPool(layout, 1)


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(InvalidArgument, match="num_blocks=0"):
        LatentPool(LAYOUT, 0)


def test_a_pool_made_in_inference_mode_can_be_written_outside_it():
    with torch.inference_mode():
        pool = LatentPool(LAYOUT, 1)
    pool.data.zero_()


def test_a_storing_thread_reads_held_blocks_while_others_are_written_and_released():
    pool = LatentPool(LAYOUT, 8)
    kept = pool.allocate(4)
    pool.write_blocks(kept, [content(b) for b in kept])
    done, wrong = threading.Event(), []

    def store():
        while not done.is_set():
            wrong.extend(b for b in kept if read(pool, b) != content(b))

    thread = threading.Thread(target=store)
    thread.start()
    for round_ in range(300):
        blocks = pool.allocate(4)
        pool.write_blocks(blocks, [content(round_)] * 4)
        pool.register(blocks[0], bytes([round_ % 256]) * 32)
        pool.release(blocks)
    done.set()
    thread.join()
    assert not wrong
