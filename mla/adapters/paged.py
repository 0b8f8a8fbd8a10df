"""Our blocks in an engine's paged cache: tensors of its own, one a layer, in pages of its own size.

A block of ours (64 tokens) is several pages of the engine (16, 32 or 64 tokens).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvstore.layout import LatentLayout
from mla.errors import Unsupported
from mla.streams import Mark

Place = tuple[int, ...]  # the pages of one block, first to last; negative is a page not to be touched

BATCH = 8  # blocks of the staging buffers


class PagedCache:
    """Copies whole blocks between bytes ``layout.block_bytes`` long and the engine's pages.

    Thread-safe. On an accelerator copies run on streams of
    their own, behind what was enqueued before the last ``fence``.
    """

    def __init__(self, layers: Sequence[Tensor], layout: LatentLayout, page_tokens: int) -> None:
        """``layers``: the tensors ``[pages, ..., tokens, entry]`` in the order of a block's bytes.

        That is entries of all layers, then each strip of all layers. Raises ``Unsupported``
        for tensors that are no whole pages of this layout.
        """
        self._rows = [_page_rows(layer, page_tokens) for layer in layers]
        per_block = layout.block_tokens // page_tokens
        nbytes = sum(rows.shape[1] for rows in self._rows) * per_block
        if nbytes != layout.block_bytes:
            raise Unsupported(
                f"{len(layers)} cache tensors make blocks of {nbytes} bytes, the layout says"
                f" {layout.block_bytes}: this cache is not what its config describes"
            )
        self.layout: Final = layout
        self.pages_per_block: Final = per_block
        self._device = self._rows[0].device
        self._cuda = self._device.type == "cuda"
        shape = (BATCH, layout.block_bytes)
        self._staging = torch.empty(shape, dtype=torch.uint8, pin_memory=self._cuda)
        self._gathered = torch.empty(shape[1:], dtype=torch.uint8, device=self._device)
        self._outgoing = torch.empty(shape[1:], dtype=torch.uint8, pin_memory=self._cuda)
        self._writing = threading.Lock()  # over the staging buffer
        self._reading = threading.Lock()  # over the outgoing one
        self._fence: torch.cuda.Event | None = None
        self._streams = [torch.cuda.Stream(self._device) for _ in range(2)] if self._cuda else []

    def fence(self) -> None:
        """Copies from now on come after what the calling thread's stream has been given so far."""
        if self._cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._fence = event

    def write_blocks(self, places: Sequence[Place], datas: Sequence[memoryview]) -> None:
        """Fill the pages of blocks, each from its bytes; done when it returns."""
        for at in range(0, len(places), BATCH):
            with self._writing:
                self._write_batch(places[at : at + BATCH], datas[at : at + BATCH])

    def mark(self) -> None:
        """Nothing of its own: ``fence`` orders all copies."""

    def read_blocks(self, blocks: Sequence[Place], outs: Sequence[memoryview], after: Mark | None) -> None:
        """Copy blocks' pages to writable ``outs``; done when it returns."""
        for place, out in zip(blocks, outs, strict=True):
            self._read(place, out)

    def _read(self, place: Place, out: memoryview) -> None:
        with self._reading:
            with self._stream(1):
                data = torch.frombuffer(out, dtype=torch.uint8)
                self._gather(place, self._gathered if self._cuda else data)
                if self._cuda:
                    self._outgoing.copy_(self._gathered, non_blocking=True)
            self._finish(1)
            if self._cuda:
                data.copy_(self._outgoing)

    def _gather(self, place: Place, target: Tensor) -> None:
        """The pages of a block into ``target [block_bytes]`` on their device."""
        pages = torch.tensor(place, device=self._device)
        offset = 0
        for rows in self._rows:
            nbytes = self.pages_per_block * rows.shape[1]
            part = target[offset : offset + nbytes].view(self.pages_per_block, rows.shape[1])
            torch.index_select(rows, 0, pages, out=part)
            offset += nbytes

    def retain(self, blocks: Sequence[Place]) -> None:
        """Nothing to do: the engine's scheduler keeps the blocks of a request that is being stored."""

    def release(self, blocks: Sequence[Place]) -> None:
        """See ``retain``."""

    def _write_batch(self, places: Sequence[Place], datas: Sequence[memoryview]) -> None:
        for staging, data in zip(self._staging.numpy(), datas, strict=False):
            staging[...] = np.frombuffer(data, np.uint8)
        with self._stream(0):
            self._scatter(places, self._staging[: len(places)].to(self._device, non_blocking=True))
        self._finish(0)

    def _scatter(self, places: Sequence[Place], staged: Tensor) -> None:
        """``staged [blocks, block_bytes]`` into their pages."""
        flat = [page for place in places for page in place]
        chosen = torch.tensor([at for at, page in enumerate(flat) if page >= 0], device=self._device)
        pages = torch.tensor([page for page in flat if page >= 0], device=self._device)
        offset = 0
        for rows in self._rows:
            nbytes = self.pages_per_block * rows.shape[1]
            source = staged[:, offset : offset + nbytes].reshape(len(flat), rows.shape[1])
            rows.index_copy_(0, pages, source if len(chosen) == len(flat) else source[chosen])
            offset += nbytes

    def _stream(self, which: int) -> torch.cuda.StreamContext:
        stream = self._streams[which] if self._cuda else None
        if stream is not None and self._fence is not None:
            stream.wait_event(self._fence)
        return torch.cuda.StreamContext(stream)

    def _finish(self, which: int) -> None:
        if self._cuda:
            self._streams[which].synchronize()


def _page_rows(layer: Tensor, page_tokens: int) -> Tensor:
    """A layer's cache as ``[pages, page bytes]``, a view of the same memory.

    An engine may cut its pages further for its kernels; then these pieces must be dense.
    """
    tokens = layer.shape[-2]
    pieces, rest = divmod(page_tokens, tokens)
    inner = layer.shape[1:]
    piece_bytes = math.prod(inner) * layer.element_size()
    stride_bytes = layer.stride(0) * layer.element_size()
    dense = layer[0].is_contiguous() and (pieces == 1 or stride_bytes == piece_bytes)
    if rest or not dense or math.prod(inner[:-2]) != 1:
        raise Unsupported(
            f"a cache tensor of shape {tuple(layer.shape)} and strides {layer.stride()} is no row of dense"
            f" pages of {page_tokens} tokens: use the engine's own (layer-compact) cache layout"
        )
    flat = layer.view(torch.uint8)
    return flat.as_strided((layer.shape[0] // pieces, piece_bytes * pieces), (stride_bytes * pieces, 1))
