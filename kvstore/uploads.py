"""Blocks as a stream of pieces, for workers that cannot map the arena."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import CHUNK_BYTES, WorkerId, worker

Blocks = Sequence[tuple[bytes, memoryview]]  # hash, bytes

_BATCH_BYTES = 32 << 20  # what one call, and so one deadline, covers


def batches(blocks: Blocks) -> Iterator[Blocks]:
    """Cut blocks of equal size into runs of about 32 MiB, at least one block each."""
    if blocks:
        count = max(1, _BATCH_BYTES // len(blocks[0][1]))
        for start in range(0, len(blocks), count):
            yield blocks[start : start + count]


def pieces(identity: WorkerId, lease: int, blocks: Blocks) -> Iterator[pb.UploadRequest]:
    """The messages of one Upload call."""
    head = pb.UploadRequest(lease=lease, worker=worker(identity))
    for block, data in blocks:
        for start in range(0, len(data), CHUNK_BYTES):
            part = bytes(data[start : start + CHUNK_BYTES])
            last = start + len(part) == len(data)
            piece = pb.UploadRequest(
                hash=b"" if start else block,
                data=part,
                offset=start,
                last=last,
                checksum=xxhash.xxh3_64_intdigest(data) if last else 0,
            )
            piece.MergeFrom(head)
            head = pb.UploadRequest()
            yield piece
