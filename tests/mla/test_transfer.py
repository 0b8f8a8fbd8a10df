"""The batching of an accelerator's copies, run on the CPU: the same code, in streams that run at once."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvstore.errors import InvalidArgument
from kvstore.layout import LatentLayout
from kvstore.memory import allocate_shared
from mla import LatentPool, Unsupported, registration, transfer
from mla.registration import ArenaRegistration
from mla.transfer import DeviceTransfer, HostTransfer, transfer_for
from tests.mla.streams import Driver, Here

LAYERS, BLOCKS, WIDTH = 3, 20, 8
BLOCK_BYTES = LAYERS * 64 * WIDTH * 2


def pool_tensor() -> Tensor:
    return torch.zeros(LAYERS, BLOCKS, 64, WIDTH, dtype=torch.bfloat16)


def device_transfer(data: Tensor, driver: Driver | None = None) -> tuple[DeviceTransfer, Here, Here]:
    driver = driver or Driver()
    incoming, outgoing = Here(), Here()
    known = ArenaRegistration(driver.register, driver.unregister)
    return DeviceTransfer(data, incoming, outgoing, known), incoming, outgoing


@pytest.fixture(autouse=True)
def small_staging(monkeypatch):
    monkeypatch.setattr(transfer, "STAGING_BYTES", 3 * BLOCK_BYTES + 1)


@given(places=st.lists(st.integers(0, BLOCKS - 1), unique=True), seed=st.integers(0, 2**32))
def test_blocks_go_in_batches_to_where_the_host_would_put_them_and_come_back(places, seed):
    generator = torch.Generator().manual_seed(seed)
    datas = [
        memoryview(torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, generator=generator).numpy())
        for _ in places
    ]
    by_host, by_device = pool_tensor(), pool_tensor()
    HostTransfer(by_host).write(places, datas)
    staged, _, _ = device_transfer(by_device)
    staged.write(places, [data.toreadonly() for data in datas])
    assert torch.equal(by_host.view(torch.uint8), by_device.view(torch.uint8))
    outs = [bytearray(BLOCK_BYTES) for _ in places]
    staged.read(places, [memoryview(out) for out in outs], staged.mark())
    assert outs == [bytes(data) for data in datas]


def test_a_staging_buffer_is_filled_again_only_behind_its_scatter_and_scattered_only_behind_its_copy():
    staged, incoming, _ = device_transfer(pool_tensor())
    for _ in range(2):
        staged.write(list(range(7)), [memoryview(bytes(BLOCK_BYTES))] * 7)
    copies = [line for line in incoming.log if line.startswith("copies: mark")]
    assert len(copies) == 6  # three batches each time
    scatters = [line.split()[-1] for line in incoming.log if line.startswith("main: mark")]
    refilled = [line.split()[-1] for line in incoming.log if line.startswith("copies: wait")]
    assert refilled == scatters[:4]  # of the batch before the last
    for line in copies:
        name = line.split()[-1]
        after = incoming.log[incoming.log.index(line) + 1 :]
        assert after[0] == f"main: wait {name}"
        assert after[1].startswith("main: mark")
    last = copies[-1].split()[-1]
    assert incoming.log[-1] == f"main: reach {last}"  # the bytes may go back to the arena now


def test_blocks_are_read_behind_what_computed_them_and_are_there_on_return():
    staged, _, outgoing = device_transfer(pool_tensor())
    written = staged.mark()
    staged.read([1, 2], [memoryview(bytearray(BLOCK_BYTES)) for _ in range(2)], written)
    assert outgoing.log == [
        "main: mark main0",
        "copies: wait main0",
        "copies: mark copies1",
        "copies: reach copies1",
    ]


def test_an_arena_is_registered_in_pieces_and_let_go_when_the_next_one_comes(monkeypatch):
    monkeypatch.setattr(registration, "PIECE_BYTES", 1 << 20)
    driver = Driver()
    known = ArenaRegistration(driver.register, driver.unregister)
    fd, first = allocate_shared(5 << 19)
    with known.using(memoryview(first)[4096:8192]):
        pass
    known.join()
    addresses = sorted(driver.pieces)
    assert [driver.pieces[address] for address in addresses] == [1 << 20, 1 << 20, 1 << 19]
    assert [address - addresses[0] for address in addresses] == [0, 1 << 20, 2 << 20]
    with pytest.raises(BufferError):
        first.close()  # what is registered must stay mapped
    with known.using(memoryview(bytearray(10))):  # from elsewhere: none of its business
        pass
    assert sorted(driver.pieces) == addresses
    other, second = allocate_shared(1 << 20)
    with known.using(memoryview(second)):
        pass
    known.join()
    assert sorted(driver.gone) == addresses
    assert list(driver.pieces.values()) == [1 << 20]
    first.close()
    os.close(fd)
    os.close(other)


def test_memory_under_a_copy_is_not_let_go():
    driver = Driver()
    known = ArenaRegistration(driver.register, driver.unregister)
    (fd, first), (other, second) = allocate_shared(1 << 20), allocate_shared(1 << 20)
    with known.using(memoryview(first)):
        known.join()
        with known.using(memoryview(second)):
            assert not driver.gone
        assert not driver.gone
    known.join()
    assert len(driver.gone) == 1
    os.close(fd)
    os.close(other)


def test_an_arena_that_cannot_be_registered_is_copied_all_the_same(caplog, monkeypatch):
    monkeypatch.setattr(registration, "PIECE_BYTES", 1 << 20)
    driver = Driver(refuse_after=1)
    known = ArenaRegistration(driver.register, driver.unregister)
    fd, arena = allocate_shared(3 << 20)
    data = pool_tensor()
    staged = DeviceTransfer(data, Here(), Here(), known)
    arena[:BLOCK_BYTES] = os.urandom(BLOCK_BYTES)
    staged.write([4], [memoryview(arena)[:BLOCK_BYTES]])
    known.join()
    assert "arena_not_registered" in caplog.text
    out = bytearray(BLOCK_BYTES)
    staged.read([4], [memoryview(out)], None)
    assert out == arena[:BLOCK_BYTES]
    os.close(fd)


def test_a_forked_child_takes_no_registration_for_its_own():
    driver = Driver()
    known = ArenaRegistration(driver.register, driver.unregister)
    fd, arena = allocate_shared(1 << 20)
    with known.using(memoryview(arena)):
        pass
    known.join()
    child = os.fork()
    if not child:
        arena.close()  # nothing keeps it
        os._exit(0 if not driver.gone else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(fd)


def test_a_pool_on_another_kind_of_device_is_refused():
    with pytest.raises(Unsupported, match="meta"):
        transfer_for(torch.empty(1, 1, 64, 8, device="meta"))


def test_a_pool_reads_several_blocks_into_as_many_buffers():
    layout = LatentLayout(num_layers=LAYERS, latent_rank=6, rope_dim=2)
    pool = LatentPool(layout, 4)
    blocks = pool.allocate(2)
    pool.write_blocks(blocks, [memoryview(bytes([n]) * BLOCK_BYTES) for n in (1, 2)])
    outs = [bytearray(BLOCK_BYTES) for _ in blocks]
    pool.read_blocks(blocks, [memoryview(out) for out in outs], pool.mark())
    assert outs == [bytes([n]) * BLOCK_BYTES for n in (1, 2)]
    with pytest.raises(InvalidArgument, match="1 buffers"):
        pool.read_blocks(blocks, [memoryview(outs[0])], None)
