"""Sums over every bit of a tensor, made where it lies, that see each value and its place.

A tensor's bytes are read as rows of 64-bit words. Two accumulators take each row times a key of its
own: one the words, one their upper halves, since a product of whole words says little of their top bits.
What has accumulated is then summed with a key for each column. All of it is integer arithmetic
that wraps around, so neither the device nor the order nor the number of threads changes the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mla.errors import Unsupported

# A quarter of a MiB: with the accumulators it stays in a core's cache, and torch gives it to one
# thread, so that no row waits for another core.
ROW_WORDS = 1 << 15
SUM_BYTES = 32
_THREADS_FROM = 64 << 20  # bytes in a CPU's memory
_WORD = 8
_PIECE = 64 * ROW_WORDS * _WORD  # bytes
_SEED = 0x6C6174656E746B76


@torch.no_grad()
def tensor_sums(tensors: Sequence[Tensor]) -> list[bytes]:
    """``SUM_BYTES`` for each tensor: equal for equal numbers, shapes and dtypes aside, on any device.

    Needs a few MiB of memory beside each tensor on its device, and as much as one step of its first
    dimension takes where it is not contiguous. Raises ``Unsupported`` for a tensor without
    plain bytes.
    """
    sums = _all_sums([tensor.detach() for tensor in tensors])
    by_device: dict[torch.device, list[int]] = {}
    for index, one in enumerate(sums):
        by_device.setdefault(one.device, []).append(index)
    found = [b""] * len(sums)
    for indices in by_device.values():  # one copy, so one wait, for each device
        rows = torch.stack([sums[index] for index in indices]).cpu().numpy()
        for index, row in zip(indices, rows, strict=True):
            found[index] = row.tobytes()
    return found


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's numbers."""
    return tensor.numel() * tensor.element_size()


def _all_sums(tensors: list[Tensor]) -> list[Tensor]:
    nbytes = sum(size_of(tensor) for tensor in tensors if tensor.device.type == "cpu")
    threads = torch.get_num_threads() if nbytes >= _THREADS_FROM else 1
    if threads == 1:
        return [_sums(tensor) for tensor in tensors]
    with ThreadPoolExecutor(threads, "latentkv-weights") as pool:
        return list(pool.map(_sums, tensors))


@torch.no_grad()
def _sums(tensor: Tensor) -> Tensor:
    words = max(1, min(ROW_WORDS, -(-size_of(tensor) // _WORD)))
    sums = torch.zeros((2, words), dtype=torch.int64, device=tensor.device)
    half = torch.empty(words, dtype=torch.int64, device=tensor.device)
    full = (*sums, half)
    rows = -(-size_of(tensor) // (ROW_WORDS * _WORD))
    for row, (first, second) in zip(_rows(tensor), _row_keys(rows), strict=True):
        whole, upper, shifted = full if len(row) == words else (one[: len(row)] for one in full)
        whole.add_(row, alpha=first)
        torch.bitwise_right_shift(row, 32, out=shifted)
        upper.add_(shifted, alpha=second)
    halves = sums.view(torch.int32).to(torch.int64)
    return (halves * _column_keys(tensor.device)[..., : 2 * words]).sum(dim=-1).flatten()


def _rows(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's bytes in its logical order as int64 words, in rows; zeros fill the last word."""
    step = ROW_WORDS * _WORD
    rest: Tensor | None = None
    for piece in _pieces(tensor):
        data = piece if rest is None or not len(rest) else torch.cat((rest, piece))
        whole = len(data) - len(data) % step
        if whole:
            yield from _words(data[:whole]).view(-1, ROW_WORDS).unbind()
        rest = data[whole:]
    if rest is not None and len(rest):
        yield _words(rest)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Flat bytes of a tensor, in its logical order, some MiB at a time."""
    if not tensor.numel():
        return
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise _unnamed(tensor)
    if tensor.is_contiguous() or tensor.dim() == 0:
        yield from torch.split(_bytes(tensor), _PIECE)
        return
    for part in torch.split(tensor, max(1, _PIECE * len(tensor) // size_of(tensor))):
        yield _bytes(part.contiguous())


def _bytes(tensor: Tensor) -> Tensor:
    try:
        # Lazily conjugated or negated numbers have other bits than they say.
        return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    except (RuntimeError, NotImplementedError) as error:
        raise _unnamed(tensor) from error


def _unnamed(tensor: Tensor) -> Unsupported:
    return Unsupported(
        f"a weight of type {type(tensor).__name__}, {tensor.dtype} and {tensor.layout} has no plain bytes to"
        " name it by: pass the revision by name"
    )


def _words(data: Tensor) -> Tensor:
    if missing := -len(data) % _WORD:
        data = torch.cat((data, data.new_zeros(missing)))
    if data.storage_offset() % _WORD or data.data_ptr() % _WORD:
        data = data.clone()
    return data.view(torch.int64)


def _row_keys(rows: int) -> Iterator[tuple[int, int]]:
    for start in range(0, rows, 4096):
        keys = _mix(np.arange(2 * start, 2 * min(rows, start + 4096), dtype=np.uint64)).reshape(-1, 2)
        yield from map(tuple, keys.tolist())


@cache
def _column_keys(device: torch.device) -> Tensor:
    """``[2, 2, 2 * ROW_WORDS]``: two sums over the halves of both accumulators."""
    keys = _mix(np.arange(8 * ROW_WORDS, dtype=np.uint64) + np.uint64(1 << 63))
    return torch.from_numpy(keys.reshape(2, 2, -1)).to(device)


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Random-looking odd numbers, the same everywhere: splitmix64."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(_SEED)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64)
