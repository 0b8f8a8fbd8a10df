"""The arithmetic between vLLM's pages and our blocks; no engine is needed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.api import Match
from kvstore.errors import InvalidArgument
from kvstore.hashing import block_hashes
from kvstore.layout import BLOCK_TOKENS, DType, LatentLayout, Strip
from kvstore.units import UnitKind
from mla.adapters.paged import PagedCache
from mla.adapters.settings import VllmSettings
from mla.adapters.vllm_plan import (
    PAGE_TOKENS,
    Feature,
    answer_units,
    external_tokens,
    extra_keys,
    first_failed,
    places,
    savable,
)
from mla.errors import Unsupported

LAYOUT = LatentLayout(
    num_layers=3, latent_rank=32, rope_dim=16, dtype=DType.BF16, strips=(Strip("indexer", 12),)
)


def caches(page_tokens: int, pages: int, *, piece: int = 0) -> list[torch.Tensor]:
    """An engine's tensors, filled with noise; ``piece`` tokens a row where kernels cut pages further."""
    rows, tokens = (pages * page_tokens // piece, piece) if piece else (pages, page_tokens)
    entries = [torch.randint(0, 256, (rows, 1, tokens, 96), dtype=torch.uint8) for _ in range(3)]
    return [
        *(entry.view(torch.bfloat16) for entry in entries),
        *(torch.randint(0, 256, (rows, tokens, 12), dtype=torch.uint8) for _ in range(3)),
    ]


@pytest.mark.parametrize("page_tokens", PAGE_TOKENS)
@pytest.mark.parametrize("piece", [0, 16])
def test_a_block_goes_through_pages_and_back_in_layer_major_order(page_tokens: int, piece: int) -> None:
    ratio = BLOCK_TOKENS // page_tokens
    tensors = caches(page_tokens, 40, piece=piece)
    cache = PagedCache(tensors, LAYOUT, page_tokens)
    place = tuple(range(7, 7 + 3 * ratio, 3))
    block = bytes(torch.randint(0, 256, (LAYOUT.block_bytes,), dtype=torch.uint8).numpy())
    cache.write_blocks([place], [memoryview(block)])
    out = bytearray(LAYOUT.block_bytes)
    cache.read_blocks([place], [memoryview(out)], cache.mark())
    assert out == block
    layer = tensors[1].view(torch.uint8).reshape(-1, page_tokens, 96)
    assert layer[list(place)].numpy().tobytes() == block[64 * 96 : 2 * 64 * 96]
    strip = tensors[5].reshape(-1, page_tokens, 12)
    assert strip[list(place)].numpy().tobytes() == block[3 * 64 * 96 + 2 * 64 * 12 :]


def test_pages_that_are_the_engines_own_are_not_touched() -> None:
    tensors = caches(16, 12)
    before = [tensor.view(torch.uint8).clone() for tensor in tensors]
    PagedCache(tensors, LAYOUT, 16).write_blocks([(-1, -1, 5, 6)], [memoryview(bytes(LAYOUT.block_bytes))])
    for now, then in zip(tensors, before, strict=True):
        changed = {page for page in range(12) if not torch.equal(now[page].view(torch.uint8), then[page])}
        assert changed == {5, 6}


def test_a_cache_of_another_size_is_refused() -> None:
    with pytest.raises(Unsupported, match="the layout says"):
        PagedCache(caches(16, 12)[:-1], LAYOUT, 16)
    with pytest.raises(Unsupported, match="dense"):
        PagedCache([tensor[..., ::2] for tensor in caches(16, 12)], LAYOUT, 16)


@given(st.sampled_from(PAGE_TOKENS), st.integers(0, 20), st.integers(0, 20), st.integers(0, 1500))
def test_places_are_the_pages_of_their_tokens(page_tokens: int, first: int, count: int, keep: int) -> None:
    pages = list(range(100, 100 + 40 * BLOCK_TOKENS // page_tokens))
    found = places(pages, first, first + count, page_tokens, keep=keep)
    assert len(found) == count
    flat = [page for place in found for page in place]
    start = first * BLOCK_TOKENS // page_tokens
    for at, page in enumerate(flat, start):
        assert page == (100 + at if (at + 1) * page_tokens > keep else -1)


@given(st.integers(1, 500), st.integers(0, 400), st.integers(0, 950))
def test_only_final_computed_tokens_are_stored_and_the_answers_last_block_waits(
    prompt: int, new: int, computed: int
) -> None:
    known = prompt + new
    blocks = savable(prompt, known, computed)
    assert blocks * BLOCK_TOKENS <= min(known, computed)
    if blocks * BLOCK_TOKENS > prompt:
        assert (blocks + 1) * BLOCK_TOKENS <= min(known, computed)


@given(st.integers(1, 500), st.integers(1, 400), st.sampled_from([0, 64, 128]))
def test_an_answers_unit_is_never_behind_what_is_stored_of_it(prompt: int, new: int, interval: int) -> None:
    ends = [
        depth
        for depth, kinds in answer_units(prompt, prompt + new, interval, ended=True).items()
        if kinds & UnitKind.REQUEST_END
    ]
    before = savable(prompt, prompt + new - 1, prompt + new - 1)
    for end in ends:
        assert before < end
    assert not any(
        kinds & UnitKind.REQUEST_END
        for kinds in answer_units(prompt, prompt + new, interval, ended=False).values()
    )


def test_a_hit_counts_from_what_the_engine_has() -> None:
    assert external_tokens(Match(blocks=10), 96) == 544
    assert external_tokens(Match(blocks=1), 96) == 0


def test_the_first_failed_page_names_its_block() -> None:
    pages = list(range(50, 90))
    assert first_failed(pages, {61, 55}, 16) == 1
    assert first_failed(pages, {7}, 16) is None


def test_salt_and_images_change_the_chain_where_they_are_and_after() -> None:
    def chain(salt: str = "", *features: Feature) -> list[bytes]:
        return block_hashes(bytes(32), [0] * 256, extra=extra_keys(salt, features))

    plain = chain()
    image = chain("", Feature("cat", 70, 100))
    assert plain[0] == image[0]
    assert len({plain[1], image[1], chain("", Feature("dog", 70, 100))[1]}) == 3
    assert image[1] != chain("", Feature("cat", 71, 100))[1]
    assert chain("a")[0] != chain("b")[0]
    assert chain("a")[3] != plain[3]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({}, "url"),
        ({"url": "unix:///kv", "sped": 1}, "sped"),
        ({"url": 3}, "url=3 is no str"),
        ({"url": "unix:///kv", "load_timeout": "soon"}, "load_timeout"),
    ],
)
def test_settings_that_are_wrong_are_named(raw: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        VllmSettings.parse(raw)


def test_settings_take_whole_numbers_for_seconds() -> None:
    assert VllmSettings.parse({"url": "unix:///kv", "load_timeout": 3}).load_timeout == 3
