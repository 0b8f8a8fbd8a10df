"""Block bytes between host memory and a pool tensor. Arena and pool differ in strides only.

In the pool a block is ``data[:, block]``, one run per layer; in the arena these runs
stand one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Transfer(Protocol):
    """Moves whole blocks, given as ``layout.block_bytes`` bytes each."""

    def write(self, blocks: Sequence[int], datas: Sequence[memoryview]) -> None:
        """Bytes into pool blocks; done (in stream order) when it returns."""

    def read(self, block: int, out: memoryview) -> None:
        """A pool block into writable bytes; done when it returns."""


def transfer_for(data: Tensor) -> Transfer:
    """The way to reach a pool tensor ``[layers, num_blocks, block, width]`` on its device."""
    return HostTransfer(data) if data.device.type == "cpu" else DeviceTransfer(data)


class HostTransfer:
    """A pool in host memory: one strided copy a block, of raw bytes since numpy has no bf16."""

    def __init__(self, data: Tensor) -> None:
        self._bytes: NDArray[np.uint8] = data.view(torch.uint8).numpy()

    def write(self, blocks: Sequence[int], datas: Sequence[memoryview]) -> None:
        """See ``Transfer``."""
        for block, source in zip(blocks, datas, strict=True):
            place = self._bytes[:, block]
            place[...] = np.frombuffer(source, np.uint8).reshape(place.shape)

    def read(self, block: int, out: memoryview) -> None:
        """See ``Transfer``."""
        place = self._bytes[:, block]
        np.copyto(np.frombuffer(out, np.uint8).reshape(place.shape), place)


class DeviceTransfer:
    """A pool on an accelerator: one copy of a batch through pinned memory and one scatter."""

    BATCH = 32  # blocks of the staging buffers

    def __init__(self, data: Tensor) -> None:
        self._data = data
        shape = (self.BATCH, data.shape[0], *data.shape[2:])
        self._pinned = torch.empty(shape, dtype=data.dtype, pin_memory=data.device.type == "cuda")
        self._bytes: NDArray[np.uint8] = self._pinned.view(torch.uint8).numpy()

    def write(self, blocks: Sequence[int], datas: Sequence[memoryview]) -> None:
        """See ``Transfer``."""
        for at in range(0, len(blocks), self.BATCH):
            part = blocks[at : at + self.BATCH]
            for staging, source in zip(self._bytes, datas[at : at + self.BATCH], strict=False):
                staging[...] = np.frombuffer(source, np.uint8).reshape(staging.shape)
            # Blocking: the staging buffer is filled again at once.
            staged = self._pinned[: len(part)].to(self._data.device)
            index = torch.tensor(part, device=self._data.device)
            self._data.index_copy_(1, index, staged.transpose(0, 1))

    def read(self, block: int, out: memoryview) -> None:
        """See ``Transfer``."""
        # The storing thread reads: it must not share the loader's staging buffer.
        host = self._data[:, block].contiguous().cpu().view(torch.uint8).numpy()
        np.copyto(np.frombuffer(out, np.uint8).reshape(host.shape), host)
