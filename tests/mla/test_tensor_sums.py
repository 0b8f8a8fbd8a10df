"""Sums over tensors: every bit and every place of it counts, and nothing else does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla import Unsupported
from mla.tensor_sums import ROW_WORDS, SUM_BYTES, tensor_sums

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.float64,
    torch.bool,
    torch.complex64,
]


def sums(tensor: torch.Tensor) -> bytes:
    return tensor_sums([tensor])[0]


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_flipped_bit_anywhere_is_seen(data):
    length = data.draw(st.sampled_from([1, 7, 8, 9, 4096, 8 * ROW_WORDS - 1, 8 * ROW_WORDS + 5]))
    content = random_bytes(length)
    before = sums(content)
    changed = content.clone()
    changed[data.draw(st.integers(0, length - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert sums(changed) != before


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_every_type_count(dtype):
    ones = torch.ones(5, 7).to(dtype)
    other = ones.clone()
    other[3, 2] = 0
    assert len(sums(ones)) == SUM_BYTES
    assert sums(other) != sums(ones)


def test_the_sign_of_zero_and_which_nan_it_is_count():
    assert sums(torch.tensor([0.0])) != sums(torch.tensor([-0.0]))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert sums(nans[:1].clone()) != sums(nans[1:].clone())


@pytest.mark.parametrize("rows", [(1, 2), (0, 999)])
def test_two_rows_that_changed_places_are_seen_though_their_sum_is_equal(rows):
    weight = torch.randn(1000, 64)
    swapped = weight.clone()
    swapped[list(rows)] = weight[list(reversed(rows))]
    assert sums(swapped) != sums(weight)


def test_two_signs_in_one_column_of_the_rows_that_are_summed_are_seen():
    weight = torch.randn(8 * ROW_WORDS, dtype=torch.float32).bfloat16()
    bits = weight.clone().view(torch.int16)
    for place in (3, 3 + 4 * ROW_WORDS):  # both the top bit of a word
        bits[place] ^= -32768
    assert sums(bits.view(torch.bfloat16)) != sums(weight)


def test_strides_alignment_and_threads_do_not_count():
    weight = torch.randn(301, 257).bfloat16()
    expected = sums(weight)
    assert sums(weight.t().contiguous().t()) == expected
    room = torch.zeros(weight.numel() + 3, dtype=torch.bfloat16)
    shifted = room[3:].view(301, 257)
    shifted.copy_(weight)
    assert sums(shifted) == expected
    assert sums(weight.expand(2, 301, 257)[1]) == expected
    assert sums(torch.nn.Parameter(weight)) == expected
    before = torch.get_num_threads()
    large = torch.arange(20 << 20, dtype=torch.int32)  # from 64 MiB on several threads read
    parts = list(large.chunk(4))
    one = tensor_sums(parts)
    try:
        torch.set_num_threads(3)
        assert tensor_sums(parts) == one
    finally:
        torch.set_num_threads(before)


def test_none_and_one_number():
    assert tensor_sums([]) == []
    assert sums(torch.empty(0, 3)) == bytes(SUM_BYTES)
    assert sums(torch.tensor(1.0)) != sums(torch.tensor(2.0))


def test_what_has_no_plain_bytes_is_refused():
    with pytest.raises(Unsupported, match="no plain bytes"):
        sums(torch.eye(3).to_sparse())
