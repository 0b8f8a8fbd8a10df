"""The DEVICE tier: one tensor of blocks, shared by all requests of a worker."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from kvstore.errors import InvalidArgument
from kvstore.layout import DType, LatentLayout
from mla.errors import PoolFull, Unsupported
from mla.streams import Mark
from mla.transfer import transfer_for

TORCH_DTYPES: Final = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}


class LatentPool:
    """``data [layers, num_blocks, block_tokens, width]`` with reference counts and an LRU by hash.

    Thread-safe. A block that is referenced more than once, or registered under a hash, is
    never written again; so a thread may read the bytes of a full block it references
    without further care.

    Invariants, under ``_lock``: every block is in exactly one of ``_free`` (no references,
    no hash), ``_idle`` (no references, a hash; least recently used first) and the blocks
    with ``_references > 0``; ``_hash_of`` and ``_block_of`` are inverse to each other, and
    ``_namespace_of`` knows the blocks of ``_hash_of``.
    """

    def __init__(self, layout: LatentLayout, num_blocks: int, device: str | torch.device = "cpu") -> None:
        """Allocates ``num_blocks`` blocks, zeroed.

        Raises ``InvalidArgument`` for a number below 1 and ``Unsupported`` for a layout
        with strips or opaque (fp8) entries, which this pool cannot compute with.
        """
        if num_blocks < 1:
            raise InvalidArgument(f"num_blocks={num_blocks}: a pool needs at least one block")
        if layout.dtype not in TORCH_DTYPES or layout.strips:
            raise Unsupported(
                f"a pool of dtype {layout.dtype.value} with {len(layout.strips)} strips:"
                " the attention computes with bf16, fp16 or fp32 entries and no strips"
            )
        self.layout: Final = layout
        self.num_blocks: Final = num_blocks
        shape = (layout.num_layers, num_blocks, layout.block_tokens, layout.width)
        with torch.inference_mode(False):  # an inference tensor could not be written outside that mode
            self.data: Final = torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=device)
        self._transfer = transfer_for(self.data)
        self._lock = threading.Lock()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._namespace_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` could give out now."""
        with self._lock:
            return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, one reference each; least recently used hashes are forgotten.

        Raises ``PoolFull`` when fewer are unreferenced; then nothing is changed.
        """
        with self._lock:
            available = len(self._free) + len(self._idle)
            if count > available:
                raise PoolFull(
                    f"{count} blocks wanted, {available} of {self.num_blocks} unreferenced: release caches,"
                    " or make the pool larger"
                )
            taken = [self._free.pop() if self._free else self._evict_oldest() for _ in range(count)]
            for block in taken:
                self._references[block] = 1
            return taken

    def acquire(self, block_hash: bytes) -> int | None:
        """The block registered under a hash, with a new reference; None if there is none."""
        with self._lock:
            block = self._block_of.get(block_hash)
            if block is not None:
                self._reference(block)
            return block

    def lookup_run(self, hashes: Sequence[bytes]) -> int:
        """How many leading ``hashes`` are registered. Takes no references."""
        with self._lock:
            for index, block_hash in enumerate(hashes):
                if block_hash not in self._block_of:
                    return index
            return len(hashes)

    def register(self, block: int, block_hash: bytes, namespace: bytes = b"") -> bool:
        """Make a full, referenced block findable. False if the hash or the block has a partner already.

        ``namespace`` is whose hash it is, for ``forget``.

        Raises ``InvalidArgument`` for a block that is not referenced.
        """
        with self._lock:
            self._require_referenced([block])
            if block_hash in self._block_of or block in self._hash_of:
                return False
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            self._namespace_of[block] = namespace
            return True

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one reference for each mention of a block that is referenced already.

        Raises ``InvalidArgument`` for one that is not; then nothing is changed.
        """
        with self._lock:
            blocks = list(blocks)
            self._require_referenced(blocks)
            for block in blocks:
                self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference for each mention, a sequence's last blocks becoming the oldest.

        (A prefix is worth more than its continuations.) Raises ``InvalidArgument`` when a
        block has fewer references than that; then nothing is changed.
        """
        with self._lock:
            for block, times in Counter(blocks).items():
                if self._references_of(block) < times:
                    raise InvalidArgument(f"block {block} is released {times} times but not held as often")
            for block in reversed(blocks):
                self._references[block] -= 1
                if self._references[block] == 0:
                    self._rest(block)

    def is_private(self, block: int) -> bool:
        """Whether the holder of a reference may write: no other one, and no hash."""
        with self._lock:
            return self._references_of(block) == 1 and block not in self._hash_of

    def references(self, block: int) -> int:
        """Number of references of a block."""
        with self._lock:
            return self._references_of(block)

    def evict(self, hashes: Iterable[bytes]) -> None:
        """Forget these hashes; unknown ones are ignored. Referenced blocks stay allocated."""
        with self._lock:
            for block_hash in hashes:
                block = self._block_of.get(block_hash)
                if block is not None:
                    self._forget(block)

    def forget(self, namespace: bytes) -> int:
        """Forget every hash of a namespace; how many. Referenced blocks stay allocated."""
        with self._lock:
            blocks = [block for block, owner in self._namespace_of.items() if owner == namespace]
            for block in blocks:
                self._forget(block)
            return len(blocks)

    def clear(self) -> None:
        """Forget every hash."""
        with self._lock:
            for block in list(self._hash_of):
                self._forget(block)

    def write_block(self, block: int, data: memoryview) -> None:
        """Fill a private block from ``layout.block_bytes`` bytes ``[layers, block_tokens, entry]``."""
        self.write_blocks([block], [data])

    def write_blocks(self, blocks: Sequence[int], datas: Sequence[memoryview]) -> None:
        """Fill private blocks, each from its bytes.

        Raises ``InvalidArgument`` for bytes of another length, or a block that is shared,
        registered or not allocated; then nothing is written.
        """
        if len(blocks) != len(datas):
            raise InvalidArgument(f"{len(blocks)} blocks but {len(datas)} buffers: pass one for each")
        for block, data in zip(blocks, datas, strict=True):
            self._require_size(data)
            if not self.is_private(block):
                raise InvalidArgument(f"block {block} is not private to the writer: allocate one to write to")
        self._transfer.write(blocks, datas)

    def mark(self) -> Mark | None:
        """What was computed so far in this thread's current stream; for ``read_blocks``."""
        return self._transfer.mark()

    def read_blocks(self, blocks: Sequence[int], outs: Sequence[memoryview], after: Mark | None) -> None:
        """Copy referenced blocks' bytes, complete at ``after``, to writable ``outs``; done when it returns.

        Raises ``InvalidArgument`` for a buffer of another length or a block not referenced.
        """
        if len(blocks) != len(outs):
            raise InvalidArgument(f"{len(blocks)} blocks but {len(outs)} buffers: pass one for each")
        for out in outs:
            self._require_size(out)
        with self._lock:
            self._require_referenced(blocks)
        self._transfer.read(blocks, outs, after)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks inside the pool, all layers (copy on write)."""
        source = torch.tensor(sources, device=self.data.device)
        target = torch.tensor(targets, device=self.data.device)
        self.data.index_copy_(1, target, self.data.index_select(1, source))

    def _reference(self, block: int) -> None:
        if self._references[block] == 0:
            del self._idle[block]
        self._references[block] += 1

    def _rest(self, block: int) -> None:
        if block in self._hash_of:
            self._idle[block] = None
        else:
            self._free.append(block)

    def _evict_oldest(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._unregister(block)
        return block

    def _unregister(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]
        del self._namespace_of[block]

    def _forget(self, block: int) -> None:
        self._unregister(block)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def _references_of(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise InvalidArgument(f"block {block} is outside the pool of {self.num_blocks} blocks")
        return self._references[block]

    def _require_referenced(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._references_of(block) == 0:
                raise InvalidArgument(f"block {block} is not referenced: acquire or allocate it first")

    def _require_size(self, data: memoryview) -> None:
        if data.nbytes != self.layout.block_bytes:
            raise InvalidArgument(
                f"a buffer of {data.nbytes} bytes; a block of this layout has {self.layout.block_bytes}"
            )


def layer_slots(layer: Tensor) -> Tensor:
    """A pool layer ``[num_blocks, block, width]`` seen as token slots ``[num_blocks * block, width]``."""
    return layer.view(-1, layer.shape[-1])
