"""Stand-ins for what only a GPU's driver can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Here:
    """``Streams`` that run at once and write down who waited for whom."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._names = iter(range(1000))
        self._lane = "main"

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._lane = "copies"
        yield
        self._lane = "main"

    def mark(self) -> Written:
        return Written(self, f"{self._lane}{next(self._names)}")

    def indices(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers)

    def note(self, what: str) -> None:
        self.log.append(f"{self._lane}: {what}")


class Written:
    def __init__(self, streams: Here, name: str) -> None:
        self._streams, self._name = streams, name
        streams.note(f"mark {name}")

    def wait(self) -> None:
        self._streams.note(f"wait {self._name}")

    def synchronize(self) -> None:
        self._streams.note(f"reach {self._name}")


class Driver:
    """Keeps book of registered memory as CUDA does."""

    def __init__(self, refuse_after: int = 1000) -> None:
        self.pieces: dict[int, int] = {}
        self.gone: list[int] = []
        self._left = refuse_after

    def register(self, address: int, nbytes: int) -> None:
        if not self._left:
            raise RuntimeError("cudaHostRegister answered 2")
        self._left -= 1
        self.pieces[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.pieces[address]
        self.gone.append(address)
