"""Block bytes between host memory and a pool tensor. Arena and pool differ in strides only.

In the pool a block is ``data[:, block]``, one run per layer; in the arena these runs
stand one behind the other.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mla.errors import Unsupported
from mla.registration import ArenaRegistration, cuda_registration
from mla.streams import CudaStreams, Mark, Streams

STAGING_BYTES = 128 << 20  # of each staging buffer; at least one block


class Transfer(Protocol):
    """Moves whole blocks, given as ``layout.block_bytes`` bytes each. Thread-safe."""

    def write(self, blocks: Sequence[int], datas: Sequence[memoryview]) -> None:
        """Bytes into pool blocks; they are not needed any more when it returns.

        What the thread's current stream is given from then on sees the blocks filled.
        """

    def mark(self) -> Mark | None:
        """What was computed so far in this thread's current stream; for ``read`` in any thread."""

    def read(self, blocks: Sequence[int], outs: Sequence[memoryview], after: Mark | None) -> None:
        """Pool blocks, as they are at ``after``, into writable bytes; done when it returns."""


def transfer_for(data: Tensor) -> Transfer:
    """The way to reach a pool tensor ``[layers, num_blocks, block, width]`` on its device.

    Raises ``Unsupported`` for a device that is neither the host nor CUDA's.
    """
    device = data.device
    if device.type == "cpu":
        return HostTransfer(data)
    if device.type != "cuda":
        raise Unsupported(f"a pool on {device}: blocks are copied to cpu and cuda devices only")
    return DeviceTransfer(data, CudaStreams(device), CudaStreams(device), cuda_registration)


class HostTransfer:
    """A pool in host memory: one strided copy a block, of raw bytes since numpy has no bf16."""

    def __init__(self, data: Tensor) -> None:
        self._bytes: NDArray[np.uint8] = data.view(torch.uint8).numpy()

    def write(self, blocks: Sequence[int], datas: Sequence[memoryview]) -> None:
        """See ``Transfer``."""
        for block, source in zip(blocks, datas, strict=True):
            place = self._bytes[:, block]
            place[...] = np.frombuffer(source, np.uint8).reshape(place.shape)

    def mark(self) -> Mark | None:
        """See ``Transfer``; the host computes in order."""
        return None

    def read(self, blocks: Sequence[int], outs: Sequence[memoryview], after: Mark | None) -> None:
        """See ``Transfer``."""
        for block, out in zip(blocks, outs, strict=True):
            place = self._bytes[:, block]
            np.copyto(np.frombuffer(out, np.uint8).reshape(place.shape), place)


class _Staging:
    """Device memory for a batch of blocks as the arena has them.

    ``read`` is the mark behind which its last content is not needed any more.
    """

    def __init__(self, data: Tensor, blocks: int) -> None:
        self.blocks = torch.empty(
            (blocks, data.shape[0], *data.shape[2:]), dtype=data.dtype, device=data.device
        )
        self.bytes = self.blocks.view(torch.uint8).view(blocks, -1)
        self.read: Mark | None = None


class DeviceTransfer:
    """A pool on an accelerator: DMA of a batch of blocks through device memory, one scatter or gather.

    Incoming, one staging buffer is filled while the other one is scattered. Copies run in
    streams of their own; the scatter is in the stream of the caller, and so before the
    attention that it is about to compute and after whatever used the blocks before.
    """

    def __init__(
        self, data: Tensor, incoming: Streams, outgoing: Streams, registration: ArenaRegistration
    ) -> None:
        self._data = data
        block_bytes = data[:, 0].numel() * data.element_size()
        self._batch = max(STAGING_BYTES // block_bytes, 1)
        self._incoming, self._outgoing = incoming, outgoing
        self._registration = registration
        self._writing = threading.Lock()  # over the staging buffers
        self._staging: list[_Staging] = []  # two, made when first needed
        self._turn = 0  # which of them is filled next

    def write(self, blocks: Sequence[int], datas: Sequence[memoryview]) -> None:
        """See ``Transfer``."""
        if not blocks:
            return
        with self._writing, self._registration.using(datas[0]):
            if not self._staging:
                size = min(self._batch, self._data.shape[1])
                self._staging = [_Staging(self._data, size) for _ in range(2)]
            for part in self._batches(len(blocks)):
                copied = self._write_batch(blocks[part], datas[part])
            copied.synchronize()  # in its stream's order, so all of them are

    def _write_batch(self, blocks: Sequence[int], datas: Sequence[memoryview]) -> Mark:
        streams, staging = self._incoming, self._staging[self._turn]
        self._turn = 1 - self._turn
        with streams.aside():
            if staging.read is not None:
                staging.read.wait()
            for row, source in zip(staging.bytes, datas, strict=False):
                row.copy_(_tensor_of(source), non_blocking=True)
            copied = streams.mark()
        copied.wait()
        staged = staging.blocks[: len(blocks)].transpose(0, 1)
        self._data.index_copy_(1, streams.indices(blocks), staged)
        staging.read = streams.mark()
        return copied

    def mark(self) -> Mark | None:
        """See ``Transfer``."""
        return self._outgoing.mark()

    def read(self, blocks: Sequence[int], outs: Sequence[memoryview], after: Mark | None) -> None:
        """See ``Transfer``."""
        streams = self._outgoing
        with self._registration.using(outs[0]) if outs else nullcontext(), streams.aside():
            if after is not None:
                after.wait()
            for part in self._batches(len(blocks)):
                # The current stream, which alone uses this memory, may reuse it: batches are in order.
                staged = self._data.index_select(1, streams.indices(blocks[part])).transpose(0, 1)
                rows = staged.contiguous().view(torch.uint8).flatten(1)
                for row, out in zip(rows, outs[part], strict=True):
                    _tensor_of(out).copy_(row, non_blocking=True)
            streams.mark().synchronize()

    def _batches(self, blocks: int) -> Iterator[slice]:
        size = min(self._batch, self._data.shape[1])
        return (slice(at, min(at + size, blocks)) for at in range(0, blocks, size))


def _tensor_of(view: memoryview) -> Tensor:
    """The same bytes as a tensor (uint8), valid as long as the view is. Not to be written if that is not."""
    # By its address, since torch warns of every read-only buffer.
    array = np.frombuffer(view, np.uint8)
    return torch.frombuffer(
        (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data), dtype=torch.uint8
    )
