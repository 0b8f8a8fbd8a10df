"""What people pass as a prompt: all that a tokenizer returns, and what is refused with the reason."""

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from kvstore.errors import InvalidArgument, InvalidTokens
from mla import Unsupported
from tests.mla.session.conftest import text
from tests.mla.zoo import byte_tokenizer

PROMPT = "".join(chr(33 + token % 90) for token in text(150))
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def worker(model, workers, embedded, tokenizer):
    worker = workers(model, embedded())
    worker.ask(tokenizer(PROMPT)["input_ids"])
    assert worker.session.flush()
    return worker


def answered(worker, *args, **kwargs):
    usage = worker.session.generate(*args, max_new_tokens=1, **kwargs).usage
    return usage.prompt_tokens, usage.prompt_cache_hit_tokens


@pytest.mark.parametrize("kind", [None, "pt", "np"])
def test_what_a_tokenizer_returns_is_a_prompt(kind, worker, tokenizer):
    for text_or_batch in (PROMPT, [PROMPT]):
        if kind == "np" and text_or_batch is PROMPT:
            continue  # a flat array has no batch to tell the mask by; covered as a list
        encoded = tokenizer(text_or_batch, return_tensors=kind)
        assert "attention_mask" in encoded
        assert answered(worker, **encoded) == (150, 128)
        assert answered(worker, encoded) == (150, 128)
        assert answered(worker, dict(encoded)) == (150, 128)
        assert answered(worker, encoded["input_ids"]) == (150, 128)


def test_a_chat_template_makes_a_prompt(worker, tokenizer):
    chat = [{"role": "user", "content": PROMPT}]
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt")
    assert isinstance(encoded, BatchEncoding)
    assert answered(worker, encoded) == answered(worker, **encoded) == (150, 128)
    assert worker.session.prefill(encoded).tokens == worker.session.prefill(**encoded).tokens == 150
    listed = tokenizer.apply_chat_template(chat, return_dict=False)
    assert answered(worker, listed) == (150, 128)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32])
def test_a_mask_of_ones_of_any_type_says_nothing(dtype, worker):
    ids = text(100)
    for mask in (torch.ones(100, dtype=dtype), torch.ones(1, 100, dtype=dtype)):
        assert answered(worker, ids, attention_mask=mask)[0] == 100
    assert answered(worker, ids, attention_mask=[1] * 100, token_type_ids=[[0] * 100])[0] == 100
    assert answered(worker, ids, attention_mask=None, token_type_ids=None)[0] == 100


DESCRIBED = {
    "left padding": ({"attention_mask": torch.tensor([[0] + [1] * 99])}, "attention_mask .*without padding"),
    "right padding": ({"attention_mask": [1] * 99 + [0]}, "attention_mask .*without padding"),
    "a mask of the cache too": (
        {"attention_mask": torch.ones(1, 120)},
        r"shape \(1, 120\) for a prompt of 100",
    ),
    "a mask of two rows": ({"attention_mask": torch.ones(2, 100)}, r"shape \(2, 100\)"),
    "a mask of four dimensions": ({"attention_mask": torch.ones(1, 1, 10, 10)}, r"shape \(1, 1, 10, 10\)"),
    "two segments": ({"token_type_ids": torch.tensor([[0] * 50 + [1] * 50])}, "token_type_ids .*one segment"),
    "offsets": ({"offset_mapping": [(0, 1)] * 100}, "offset_mapping in a stored session"),
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_what_would_change_the_answer_is_refused_with_the_reason(name, worker):
    described, reason = DESCRIBED[name]
    with pytest.raises(Unsupported, match=reason):
        worker.session.generate(text(100), **described)
    with pytest.raises(Unsupported, match=reason):
        worker.session.generate({"input_ids": text(100), **described})


def test_padded_batches_are_refused(worker, tokenizer):
    tokenizer.pad_token = "A"
    encoded = tokenizer([PROMPT, PROMPT[:40]], padding=True, return_tensors="pt")
    with pytest.raises(Unsupported, match="a batch of 2 prompts"):
        worker.session.generate(**encoded)
    alone = tokenizer([PROMPT[:40]], padding="max_length", max_length=60, return_tensors="pt")
    with pytest.raises(Unsupported, match="without padding"):
        worker.session.generate(alone)


NO_PROMPTS = {
    "nothing": (None, "pass input_ids"),
    "a text": (PROMPT, "tokenize it first"),
    "bytes": (b"abc", "tokenize it first"),
    "an empty encoding": (BatchEncoding({"input_ids": torch.zeros(1, 0, dtype=torch.long)}), "is empty"),
    "an encoding without ids": (BatchEncoding({"attention_mask": [1]}), "pass input_ids"),
    "beyond the vocabulary": ([1, 2, 128], "token id 128 is outside the model's vocabulary of 128"),
    "far beyond": (torch.tensor([[1, 2, 1 << 40]]), "outside"),
    "floats": (np.ones(9), "float64"),
    "bools": (torch.ones(1, 9, dtype=torch.bool), "bool"),
    "complex": (torch.ones(9, dtype=torch.complex64), "complex64"),
    "meta": (torch.ones(9, dtype=torch.long, device="meta"), "meta"),
    "sparse": (torch.ones(9, dtype=torch.long).to_sparse(), "sparse"),
    "ragged": ([[1, 2], [3]], "no flat sequence"),
    "holes": ([1, None, 3], "type object"),
    "deep": (np.ones((1, 1, 9), np.int64), r"shape \(1, 1, 9\)"),
    "a set": ({1, 2}, "shape"),
}


@pytest.mark.parametrize("name", NO_PROMPTS)
def test_what_is_no_prompt_is_refused_before_anything_is_computed(name, worker):
    prompt, reason = NO_PROMPTS[name]
    before = worker.session.counters
    for call in (worker.session.generate, worker.session.prefill):
        with pytest.raises(InvalidTokens, match=reason):
            call(prompt)
    assert worker.session.counters == before


def test_a_mask_twice_and_options_of_prefill_are_refused(worker):
    with pytest.raises(InvalidArgument, match="attention_mask is passed twice"):
        worker.session.generate({"input_ids": [1], "attention_mask": [1]}, attention_mask=[1])
    with pytest.raises(InvalidArgument, match="prefill takes no max_new_tokens"):
        worker.session.prefill([1], max_new_tokens=3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_of_any_width_are_ids(dtype, worker):
    assert answered(worker, torch.tensor(text(100), dtype=dtype))[0] == 100
    assert answered(worker, torch.tensor([text(100)], dtype=dtype).numpy())[0] == 100
    assert answered(worker, [text(100)])[0] == 100
