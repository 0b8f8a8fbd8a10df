"""Our blocks in SGLang's host pool: one page is one block, in one of three orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstore.layout import LatentLayout
from mla.errors import Unsupported
from mla.streams import Mark

# How the pool's tensor is cut, and where pages, layers, tokens and bytes of an entry stand in it.
ORDERS: Final = {
    "layer_first": ("layers", "pages", "tokens"),
    "page_first": ("pages", "tokens", "layers"),
    "page_first_direct": ("pages", "layers", "tokens"),
}


class HostPages:
    """A view ``[pages, layers, tokens, entry bytes]`` of the pool: our order, whatever its own is.

    Thread-safe as far as no two threads are given one page, which SGLang sees to.
    """

    def __init__(self, buffer: Tensor, order: str, layout: LatentLayout) -> None:
        """``buffer`` is the pool's own tensor. Raises ``Unsupported`` for an unknown order or size."""
        if order not in ORDERS:
            raise Unsupported(f"--hicache-mem-layout {order}: latentkv knows {', '.join(ORDERS)}")
        axes = ORDERS[order]
        sizes = {"layers": layout.num_layers, "pages": -1, "tokens": layout.block_tokens}
        raw: NDArray[np.uint8] = buffer.view(torch.uint8).numpy()
        page_bytes = layout.entries_bytes
        if not raw.flags.c_contiguous or raw.nbytes % page_bytes:
            raise Unsupported(
                f"a host pool of shape {tuple(buffer.shape)} is no row of pages of {page_bytes} bytes"
            )
        cut = raw.reshape(*(sizes[axis] for axis in axes), layout.entry_bytes)
        self._pages = cut.transpose(*(axes.index(axis) for axis in ("pages", "layers", "tokens")), 3)

    def write_block(self, page: int, data: memoryview) -> None:
        """Fill a page from a block's bytes."""
        place = self._pages[page]
        np.copyto(place, np.frombuffer(data, np.uint8).reshape(place.shape))

    def mark(self) -> None:
        """Nothing to wait for: SGLang has written a page before it asks to store it."""

    def read_blocks(self, blocks: Sequence[int], outs: Sequence[memoryview], after: Mark | None) -> None:
        """Copy pages' bytes, as blocks', to writable ``outs``."""
        for page, out in zip(blocks, outs, strict=True):
            place = self._pages[page]
            np.copyto(np.frombuffer(out, np.uint8).reshape(place.shape), place)

    def retain(self, blocks: object) -> None:
        """Nothing to do: SGLang keeps a page while it is being stored."""

    def release(self, blocks: object) -> None:
        """See ``retain``."""
