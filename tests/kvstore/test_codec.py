import contextlib
import os

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codec import Raw, Zstd, codec_by_id, codec_by_name
from kvstore.errors import CorruptBlock, InvalidArgument


def latents(count: int, itemsize: int) -> memoryview:
    """Numbers like a latent's: exponents that repeat, mantissas that don't."""
    values = np.random.default_rng(7).normal(size=count).astype(np.float32)
    if itemsize == 4:
        values = values.astype(np.float16).astype(np.float32)  # as a widened checkpoint gives them
    high_bytes = values.view(np.uint8).reshape(-1, 4)[:, 4 - itemsize :]
    return memoryview(np.ascontiguousarray(high_bytes).reshape(-1)).cast("B")


def decoded(codec_id: int, data: bytes | memoryview, nbytes: int, itemsize: int) -> bytes:
    out = bytearray(nbytes)
    codec_by_id(codec_id).decode_into(data, memoryview(out), itemsize)
    return bytes(out)


@given(
    codec=st.sampled_from([Raw(), Zstd(), Zstd(level=3)]), itemsize=st.sampled_from([1, 2, 4]), data=st.data()
)
def test_every_block_comes_back_as_it_was(codec, itemsize, data):
    count = data.draw(st.integers(0, 300))
    block = data.draw(
        st.one_of(
            st.binary(min_size=count * itemsize, max_size=count * itemsize),
            st.just((bytes([1, 2, 3, 4]) * count)[: count * itemsize]),
        )
    )
    encoded = codec.encode(memoryview(block), itemsize)
    assert decoded(encoded.codec_id, encoded.data, len(block), itemsize) == block


@pytest.mark.parametrize("itemsize", [2, 4])
def test_zstd_output_is_padded_to_eighths_and_smaller_than_the_block(itemsize):
    block = latents(1 << 16, itemsize)
    encoded = Zstd().encode(block, itemsize)
    assert encoded.codec_id == Zstd.codec_id
    assert len(encoded.data) % (block.nbytes // 8) == 0
    assert len(encoded.data) < block.nbytes
    assert decoded(encoded.codec_id, encoded.data, block.nbytes, itemsize) == bytes(block)


def test_bytes_are_split_into_planes_before_they_are_compressed():
    block = memoryview(bytes(range(256)) * 64)
    encoded = Zstd().encode(block, 2)
    planes = zstandard.ZstdDecompressor().decompress(encoded.data)
    assert planes == bytes(block[::2]) + bytes(block[1::2])


def test_a_block_that_does_not_shrink_is_stored_raw_and_says_so():
    block = memoryview(os.urandom(8192))
    encoded = Zstd().encode(block, 2)
    assert encoded.codec_id == Raw.codec_id
    assert encoded.data is block


def test_raw_neither_copies_nor_changes():
    block = memoryview(bytearray(b"abcd"))
    assert Raw().encode(block, 2).data is block


@settings(max_examples=300)
@given(rubbish=st.binary(max_size=200), magic=st.booleans(), codec=st.sampled_from([0, 1]))
def test_rubbish_is_a_corrupt_block_or_decodes_within_bounds(rubbish, magic, codec):
    guarded = bytearray(64 + 128 + 64)
    out = memoryview(guarded)[64:192]
    with contextlib.suppress(CorruptBlock):
        codec_by_id(codec).decode_into((b"\x28\xb5\x2f\xfd" if magic else b"") + rubbish, out, 2)
    assert not any(guarded[:64])
    assert not any(guarded[192:])


@settings(max_examples=300)
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_never_escapes_as_another_error(at, bit):
    block = latents(2048, 2)
    data = bytearray(Zstd().encode(block, 2).data)
    data[at % len(data)] ^= 1 << bit
    with contextlib.suppress(CorruptBlock):
        assert len(decoded(Zstd.codec_id, bytes(data), block.nbytes, 2)) == block.nbytes


@pytest.mark.parametrize("keep", [0, 1, 5, 17, 100])
def test_a_truncated_frame_is_corrupt(keep):
    block = latents(2048, 2)
    with pytest.raises(CorruptBlock):
        decoded(Zstd.codec_id, Zstd().encode(block, 2).data[:keep], block.nbytes, 2)


def test_a_frame_that_announces_more_than_the_block_is_refused_before_any_allocation():
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(CorruptBlock, match="announces 16777216 bytes; the block has 4096"):
        decoded(Zstd.codec_id, bomb, 4096, 2)


def test_a_frame_without_a_size_is_refused():
    chunker = zstandard.ZstdCompressor(write_content_size=False)
    with pytest.raises(CorruptBlock):
        decoded(Zstd.codec_id, chunker.compress(bytes(4096)), 4096, 2)


def test_raw_of_another_length_is_corrupt():
    with pytest.raises(CorruptBlock, match="has 3 bytes; the block has 4"):
        decoded(Raw.codec_id, b"abc", 4, 1)


@pytest.mark.parametrize(("nbytes", "itemsize"), [(5, 2), (6, 4), (8, 3), (8, 0)])
def test_a_block_that_is_no_whole_count_of_numbers_is_refused(nbytes, itemsize):
    for codec in (Raw(), Zstd()):
        with pytest.raises(InvalidArgument, match=f"itemsize={itemsize}"):
            codec.encode(memoryview(bytes(nbytes)), itemsize)


def test_unknown_codecs_and_levels_are_refused_by_name():
    with pytest.raises(CorruptBlock, match="codec id 77"):
        codec_by_id(77)
    with pytest.raises(InvalidArgument, match="'lz5'"):
        codec_by_name("lz5")
    with pytest.raises(InvalidArgument, match="level=99"):
        Zstd(level=99)
    assert codec_by_name("zstd").codec_id == Zstd.codec_id
