"""Ways to call a model, each with its outcome where the model is attached: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, PreTrainedModel, StaticCache, WatermarkingConfig
from transformers.generation import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from tests.mla.zoo import byte_tokenizer, tokens

PROMPT = 150
SHORT = tokens(9, seed=5)


class Growing(LogitsProcessor):
    """Keeps a state: it shifts the scores by how often it was called, and by all the tokens so far."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.roll(self.calls + int(ids.sum()) % 7, dims=-1)


class AtThird(StoppingCriteria):
    def __call__(self, ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((ids.shape[0],), ids.shape[1] >= PROMPT + 3)


class Collecting(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def put(self, value: Tensor) -> None:
        self.seen += value.flatten().tolist()

    def end(self) -> None:
        self.seen.append(-1)


TOKENIZER = byte_tokenizer()


# What is right in a stored session too: options for `generate`, made anew for each call.
SERVED: dict[str, Callable[[], dict[str, Any]]] = {
    "greedy": dict,
    "max_length": lambda: {"max_length": PROMPT + 4, "max_new_tokens": None},
    "min_new_tokens": lambda: {"min_new_tokens": 3, "eos_token_id": list(range(100))},
    "max_time": lambda: {"max_time": 600.0},
    "stop_strings": lambda: {"stop_strings": list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), "tokenizer": TOKENIZER},
    "sampling": lambda: {"do_sample": True, "temperature": 30.0, "top_k": 20, "top_p": 0.9, "min_p": 1e-3},
    "typical": lambda: {"do_sample": True, "typical_p": 0.9, "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4},
    "beams": lambda: {"num_beams": 3},
    "beams that sample": lambda: {"num_beams": 3, "do_sample": True, "temperature": 20.0},
    "several of the beams": lambda: {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.3},
    "several answers": lambda: {"num_return_sequences": 3, "do_sample": True, "temperature": 30.0},
    "early_stopping": lambda: {"num_beams": 3, "early_stopping": True, "eos_token_id": list(range(40))},
    "repetition_penalty": lambda: {"repetition_penalty": 3.0, "encoder_repetition_penalty": 2.0},
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 1},
    "bad_words_ids": lambda: {"bad_words_ids": [[t] for t in range(64)], "renormalize_logits": True},
    "forced_eos_token_id": lambda: {"forced_eos_token_id": 3, "eos_token_id": 3},
    "suppress_tokens": lambda: {"suppress_tokens": list(range(50)), "begin_suppress_tokens": [70, 71]},
    "sequence_bias": lambda: {"sequence_bias": {(t,): 50.0 for t in range(20)}},
    "guidance_scale": lambda: {"guidance_scale": 1.5},
    "negative prompt": lambda: {"guidance_scale": 3.0, "negative_prompt_ids": SHORT},
    "watermarking_config": lambda: {"watermarking_config": WatermarkingConfig(bias=40.0)},
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: [len(ids) % 90, 91]},
    "logits_processor": lambda: {"logits_processor": [Growing()]},
    "stopping_criteria": lambda: {"stopping_criteria": [AtThird()]},
    "streamer": lambda: {"streamer": Collecting()},
    "scores": lambda: {"output_scores": True, "output_logits": True},
    "compile_config": lambda: {"compile_config": CompileConfig(), "disable_compile": True},
}


@dataclass(frozen=True)
class Way:
    """A way to run a model on a prompt ``[1, n]``: what it gives, to be compared; ``right`` or refused."""

    run: Callable[[PreTrainedModel, Tensor], Tensor]
    right: bool = True


def generated(**options: Any) -> Callable[[PreTrainedModel, Tensor], Tensor]:
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0} | options
    return lambda model, ids: model.generate(ids, **settings)


def forwarded(**options: Any) -> Callable[[PreTrainedModel, Tensor], Tensor]:
    return lambda model, ids: model(ids, **options).logits


def zeroed(places: slice, length: int = PROMPT) -> Tensor:
    mask = torch.ones(1, length, dtype=torch.long)
    mask[:, places] = 0
    return mask


def in_parts(make: Callable[[PreTrainedModel], Any], mask: Tensor | None = None) -> Callable[..., Tensor]:
    def run(model: PreTrainedModel, ids: Tensor) -> Tensor:
        cache, parts, done = make(model), [], 0
        for part in ids.split(60, dim=1):
            done += part.shape[1]
            seen = None if mask is None else mask[:, :done]
            parts.append(model(part, attention_mask=seen, past_key_values=cache).logits)
        return torch.cat(parts, dim=1)

    return run


def valid(run: Callable[..., Tensor], places: slice) -> Callable[..., Tensor]:
    """Only what stands at tokens: what is computed at padding means nothing."""
    return lambda model, ids: run(model, ids)[:, places]


class MyCache(DynamicCache):
    pass


def dynamic(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def static(model: PreTrainedModel) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=256)


def embeds(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(inputs_embeds=model.get_input_embeddings()(ids)).logits


def embeds_generated(model: PreTrainedModel, ids: Tensor) -> Tensor:
    inputs = model.get_input_embeddings()(ids)
    return model.generate(inputs_embeds=inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)


def own_loop(model: PreTrainedModel, ids: Tensor, **kwargs: Any) -> Tensor:
    """A way of decoding of one's own, for `custom_generate`."""
    for _ in range(4):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def batch(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model.generate_batch([ids[0].tolist()], max_new_tokens=2)  # refused before it begins


_4D = torch.zeros(1, 1, PROMPT, PROMPT)
POSITIONS = torch.arange(PROMPT)[None]
PACKED = torch.cat((torch.arange(70), torch.arange(PROMPT - 70)))[None]
CU = torch.tensor([0, 70, PROMPT], dtype=torch.int32)

# Beside SERVED, which a plain attached model answers right too.
WAYS: dict[str, Way] = {
    "forward": Way(forwarded()),
    "use_cache=False": Way(generated(use_cache=False)),
    "cache_implementation=dynamic": Way(generated(cache_implementation="dynamic")),
    "cache_implementation=static": Way(generated(cache_implementation="static"), right=False),
    "cache_implementation=sliding_window": Way(generated(cache_implementation="sliding_window"), right=False),
    "cache_implementation=hybrid_chunked": Way(generated(cache_implementation="hybrid_chunked"), right=False),
    "cache_implementation=paged": Way(generated(cache_implementation="paged"), right=False),
    "generate_batch": Way(batch, right=False),
    "max_cache_len": Way(generated(max_cache_len=400)),
    "prefill_chunk_size": Way(generated(prefill_chunk_size=40)),
    "prompt_lookup_num_tokens": Way(generated(prompt_lookup_num_tokens=3)),
    "assistant_early_exit": Way(generated(assistant_early_exit=1)),
    "custom_generate": Way(lambda model, ids: model.generate(ids, custom_generate=own_loop)),
    "output_attentions in generate": Way(generated(output_attentions=True), right=False),
    "output_attentions": Way(forwarded(output_attentions=True), right=False),
    "output_hidden_states": Way(lambda m, ids: torch.cat(m(ids, output_hidden_states=True).hidden_states)),
    "inputs_embeds": Way(embeds),
    "inputs_embeds in generate": Way(embeds_generated),
    "a DynamicCache": Way(in_parts(dynamic)),
    "a DynamicCache without a config": Way(in_parts(lambda model: DynamicCache())),
    "a StaticCache": Way(in_parts(static), right=False),
    "a StaticCache and a mask": Way(in_parts(static, zeroed(slice(0))), right=False),
    "a StaticCache in generate": Way(lambda m, i: generated(past_key_values=static(m))(m, i), right=False),
    "a class of one's own as a cache": Way(in_parts(lambda model: MyCache()), right=False),
    "mask of ones": Way(forwarded(attention_mask=zeroed(slice(0)))),
    "mask of bools": Way(forwarded(attention_mask=zeroed(slice(0)).bool())),
    "mask of floats": Way(valid(forwarded(attention_mask=zeroed(slice(40)).float()), slice(40, None))),
    "left padding": Way(valid(forwarded(attention_mask=zeroed(slice(40))), slice(40, None))),
    "right padding": Way(valid(forwarded(attention_mask=zeroed(slice(90, None))), slice(90))),
    "padding in between": Way(valid(forwarded(attention_mask=zeroed(slice(40, 50))), slice(50, None))),
    "padding over a cache": Way(valid(in_parts(dynamic, zeroed(slice(20))), slice(20, None))),
    "padding in generate": Way(generated(attention_mask=zeroed(slice(20)))),
    "longer mask over a cache": Way(forwarded(attention_mask=zeroed(slice(3, 9), PROMPT + 9))),
    "longer mask of ones": Way(forwarded(attention_mask=zeroed(slice(0), 200), use_cache=False), right=False),
    "shorter mask": Way(forwarded(attention_mask=zeroed(slice(0), 99)), right=False),
    "mask of other rows": Way(forwarded(attention_mask=zeroed(slice(0)).repeat(2, 1)), right=False),
    "mask of one dimension": Way(forwarded(attention_mask=zeroed(slice(0))[0]), right=False),
    "mask of three dimensions": Way(forwarded(attention_mask=zeroed(slice(0))[None]), right=False),
    "mask of four dimensions": Way(forwarded(attention_mask=_4D), right=False),
    "a mask for each kind of layer": Way(forwarded(attention_mask={"full_attention": _4D}), right=False),
    "position_ids": Way(forwarded(position_ids=POSITIONS)),
    "position_ids with gaps": Way(forwarded(position_ids=POSITIONS * 3 + 7)),
    "packed position_ids": Way(forwarded(position_ids=PACKED, use_cache=False), right=False),
    "cu_seq_lens": Way(forwarded(position_ids=PACKED, cu_seq_lens_q=CU, cu_seq_lens_k=CU), right=False),
    "is_causal=False": Way(forwarded(is_causal=False), right=False),
    "positional arguments": Way(lambda model, ids: model(ids, zeroed(slice(40))).logits[:, 40:]),
    "positional mask of four dimensions": Way(lambda model, ids: model(ids, _4D).logits, right=False),
    "logits_to_keep": Way(forwarded(logits_to_keep=3)),
}
