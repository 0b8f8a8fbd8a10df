import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument, InvalidTokens
from kvstore.hashing import ROOT, as_tokens, block_hashes, check_hashes, split_hashes

KEY = b"k" * 32
IDS = st.integers(0, 2**32 - 1)


def test_the_hash_is_the_documented_one():
    ids = list(range(128))
    first = hashlib.blake2b(ROOT + np.arange(64, dtype="<u4").tobytes(), key=KEY, digest_size=32).digest()
    second = hashlib.blake2b(
        first + np.arange(64, 128, dtype="<u4").tobytes() + b"image", key=KEY, digest_size=32
    ).digest()
    assert block_hashes(KEY, ids, extra={1: b"image"}) == [first, second]


def test_a_partial_block_has_no_hash():
    assert block_hashes(KEY, list(range(63))) == []
    assert len(block_hashes(KEY, list(range(129)))) == 2


@given(st.lists(IDS, min_size=64, max_size=300), st.data())
def test_equal_hash_means_equal_whole_prefix(ids, data):
    at = data.draw(st.integers(0, len(ids) - 1))
    other = list(ids)
    other[at] = (ids[at] + 1) % 2**32
    ours, theirs = block_hashes(KEY, ids), block_hashes(KEY, other)
    assert ours[: at // 64] == theirs[: at // 64]
    assert not set(ours[at // 64 :]) & set(theirs[at // 64 :])


@given(st.lists(IDS, min_size=1, max_size=300), st.integers(0, 4))
def test_hashing_goes_on_from_a_parent(ids, cut):
    whole = block_hashes(KEY, ids)
    cut = min(cut, len(whole))
    rest = ids[64 * cut :]
    if rest:
        assert block_hashes(KEY, rest, parent=whole[cut - 1] if cut else ROOT) == whole[cut:]


@given(st.lists(IDS, min_size=64, max_size=64))
def test_arrays_and_lists_of_the_same_ids_hash_alike(ids):
    expected = block_hashes(KEY, ids)
    assert block_hashes(KEY, np.array(ids, dtype=np.int64)) == expected
    assert block_hashes(KEY, np.array(ids, dtype=">u4")) == expected
    assert block_hashes(KEY, tuple(ids)) == expected


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([], "empty"),
        ([1, -1], "-1"),
        ([2**32], str(2**32)),
        ([1.5], "float64"),
        (["a"], "integers"),
        ([True], "bool"),
        ([[1, 2]], "shape"),
        (np.zeros((2, 64), np.int64), "shape"),
    ],
)
def test_bad_tokens_are_refused_with_the_value(ids, said):
    with pytest.raises(InvalidTokens, match=said):
        as_tokens(ids)


@pytest.mark.parametrize(("key", "parent"), [(b"", ROOT), (KEY, b"x"), (KEY[:-1], ROOT)])
def test_keys_and_parents_of_the_wrong_length_are_refused(key, parent):
    with pytest.raises(InvalidArgument, match="both need 32"):
        block_hashes(key, [1], parent=parent)


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=5))
def test_hashes_are_cut_from_a_blob(hashes):
    assert split_hashes(b"".join(hashes)) == hashes


def test_hashes_that_numpy_made_are_hashes_and_others_are_refused():
    check_hashes([bytes(32), np.bytes_(b"h" * 32)])
    for wrong in (b"h" * 31, "h" * 32, None, bytearray(32)):
        with pytest.raises(InvalidArgument, match="is no block hash"):
            check_hashes([bytes(32), wrong])


def test_a_blob_of_no_whole_hashes_is_refused():
    with pytest.raises(InvalidArgument, match="33 bytes"):
        split_hashes(b"x" * 33)


@pytest.mark.parametrize("tokens", [[[1, 2], [3]], [1 << 70], [[]]], ids=["ragged", "beyond u64", "nested"])
def test_what_is_no_flat_sequence_of_integers_is_refused(tokens):
    with pytest.raises(InvalidTokens):
        as_tokens(tokens)
