"""Order between copies and computing on one device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Let what this thread's current stream is given from now on come after it."""

    def synchronize(self) -> None:
        """Wait here until it is reached."""


class Streams(Protocol):
    """A thread's current stream, and one beside it for copies."""

    def aside(self) -> AbstractContextManager[object]:
        """Inside, the copying stream is the current one."""

    def mark(self) -> Mark:
        """The end of the current stream as it is now."""

    def indices(self, numbers: Sequence[int]) -> Tensor:
        """``numbers`` (int64) on the device, in order of the current stream; waits for nothing."""


class CudaStreams:
    """``Streams`` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def aside(self) -> AbstractContextManager[object]:
        """See ``Streams``."""
        return torch.cuda.stream(self._copies)

    def mark(self) -> Mark:
        """See ``Streams``."""
        mark: Mark = torch.cuda.current_stream(self._device).record_event()
        return mark

    def indices(self, numbers: Sequence[int]) -> Tensor:
        """See ``Streams``."""
        # From pageable memory the host would wait for all that the stream was given before.
        return torch.tensor(numbers, pin_memory=True).to(self._device, non_blocking=True)
