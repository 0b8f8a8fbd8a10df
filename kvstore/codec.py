"""How a block's bytes are stored: ``raw``, or ``zstd`` over byte planes.

Lossless on latents: exponents repeat, mantissas don't, so bytes are sorted by their
position in the number before they are compressed. Encoded sizes are padded to eighths
of the block, since a few equal sizes keep a payload file from fragmenting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import zstandard

from kvstore.errors import CorruptBlock, InvalidArgument

ITEM_SIZES = (1, 2, 4)
_EIGHTHS = 8
_WINDOW_LIMIT = 1 << 27  # bytes; what the decoder may allocate besides the block itself


@dataclass(frozen=True, slots=True)
class Encoded:
    """Encoded bytes, and the id of the codec that decodes them (not always the one asked)."""

    codec_id: int
    data: bytes | memoryview


class Codec(Protocol):
    """Turns a block into stored bytes and back. Thread-safe; holds no state."""

    name: ClassVar[str]
    codec_id: ClassVar[int]
    in_place: ClassVar[bool]  # stored bytes are the block itself: read them straight into it

    def encode(self, data: memoryview, itemsize: int) -> Encoded:
        """Encode a contiguous block of numbers of ``itemsize`` (1, 2 or 4) bytes.

        The result may be a view of ``data``. Raises ``InvalidArgument`` when ``data``
        is no whole count of numbers.
        """

    def decode_into(self, data: bytes | memoryview, out: memoryview, itemsize: int) -> None:
        """Decode into ``out`` (contiguous, writable, exactly one block long).

        Raises ``CorruptBlock`` for anything but an encoding of a block of that length;
        ``out`` may then hold anything. Memory is bounded by the length of ``out``.
        """


@dataclass(frozen=True, slots=True)
class Raw:
    """The block as it is."""

    name: ClassVar[str] = "raw"
    codec_id: ClassVar[int] = 0
    in_place: ClassVar[bool] = True

    def encode(self, data: memoryview, itemsize: int) -> Encoded:
        _require_whole(data.nbytes, itemsize)
        return Encoded(self.codec_id, data)

    def decode_into(self, data: bytes | memoryview, out: memoryview, itemsize: int) -> None:
        _require_whole(out.nbytes, itemsize)
        if memoryview(data).nbytes != out.nbytes:
            raise CorruptBlock(f"raw payload has {memoryview(data).nbytes} bytes; the block has {out.nbytes}")
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))


@dataclass(frozen=True, slots=True)
class Zstd:
    """Byte planes, then one zstd frame, padded with zeros to eighths of the block.

    The frame knows its own end, so decoding ignores the padding. A block that does not
    save an eighth is stored raw, and ``Encoded.codec_id`` says so.
    """

    name: ClassVar[str] = "zstd"
    codec_id: ClassVar[int] = 1
    in_place: ClassVar[bool] = False
    level: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.level <= zstandard.MAX_COMPRESSION_LEVEL:
            raise InvalidArgument(
                f"zstd level={self.level} is outside [1, {zstandard.MAX_COMPRESSION_LEVEL}]; 1 is the default"
            )

    def encode(self, data: memoryview, itemsize: int) -> Encoded:
        _require_whole(data.nbytes, itemsize)
        planes = np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(-1, itemsize).T)
        frame = zstandard.ZstdCompressor(level=self.level).compress(planes.reshape(-1).data)
        eighth = -(-data.nbytes // _EIGHTHS)
        padded = -(-len(frame) // eighth) * eighth if eighth else 0
        if padded >= data.nbytes:
            return Encoded(Raw.codec_id, data)
        return Encoded(self.codec_id, frame.ljust(padded, b"\0"))

    def decode_into(self, data: bytes | memoryview, out: memoryview, itemsize: int) -> None:
        _require_whole(out.nbytes, itemsize)
        planes = np.frombuffer(_decompress(data, out.nbytes), np.uint8).reshape(itemsize, -1)
        np.copyto(np.frombuffer(out, np.uint8).reshape(-1, itemsize), planes.T)


def _decompress(data: bytes | memoryview, nbytes: int) -> bytes:
    # The header is checked first: a damaged one may announce any size, and zstd would allocate it.
    try:
        header = zstandard.get_frame_parameters(data)
        if header.content_size != nbytes or header.window_size > max(nbytes, _WINDOW_LIMIT):
            raise CorruptBlock(f"zstd frame announces {header.content_size} bytes; the block has {nbytes}")
        block = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise CorruptBlock(f"zstd frame is damaged: {error}") from error
    if len(block) != nbytes:
        raise CorruptBlock(f"zstd frame holds {len(block)} bytes; the block has {nbytes}")
    return block


def _require_whole(nbytes: int, itemsize: int) -> None:
    if itemsize not in ITEM_SIZES or nbytes % itemsize:
        raise InvalidArgument(f"{nbytes} bytes with itemsize={itemsize}: use 1, 2 or 4, dividing the block")


_CODECS: tuple[Codec, ...] = (Raw(), Zstd())
_BY_ID = {codec.codec_id: codec for codec in _CODECS}
_BY_NAME = {codec.name: codec for codec in _CODECS}


def codec_by_id(codec_id: int) -> Codec:
    """The codec that decodes what was stored under this id. Raises ``CorruptBlock`` for an unknown id."""
    if codec_id not in _BY_ID:
        raise CorruptBlock(f"codec id {codec_id} is unknown; known are {sorted(_BY_ID)}")
    return _BY_ID[codec_id]


def codec_by_name(name: str) -> Codec:
    """The codec with this name, at its default level. Raises ``InvalidArgument`` for an unknown name."""
    if name not in _BY_NAME:
        raise InvalidArgument(f"codec {name!r} is unknown; use one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
