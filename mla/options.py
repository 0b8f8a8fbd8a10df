"""The options of ``generate``, and what a stored session does with each: a table to look up and to test.

An option is served only if it stands here, so one that a later transformers brings is
refused until somebody has looked at it.
"""

from __future__ import annotations

from collections.abc import Mapping

_DRAFTS = "drafts are cut off the cache again, which is wrong for one that starts with a loaded prefix"
_IDS = "blocks are named by token ids alone; pass one unpadded prompt of them"
_CACHE = "the session brings its own cache"
_OTHER = "what another way of decoding does with the cache is not known"
_PART = "with a hit only the rest of the prompt is computed, so a part would be missing; call model.generate"
REFUSED: Mapping[str, str] = {
    "prompt_lookup_num_tokens": _DRAFTS,
    "assistant_model": _DRAFTS,
    "assistant_early_exit": _DRAFTS,
    "is_assistant": _DRAFTS,
    "use_mtp": _DRAFTS,
    "speculation_type": _DRAFTS,
    "custom_generate": _OTHER,
    "penalty_alpha": _OTHER,
    "dola_layers": _OTHER,
    "constraints": _OTHER,
    "force_words_ids": _OTHER,
    "num_beam_groups": _OTHER,
    "diversity_penalty": _OTHER,
    "position_ids": _IDS,
    "inputs": _IDS,
    "inputs_embeds": _IDS,
    "token_healing": "it changes the prompt's last tokens, for which the cache was filled",
    "past_key_values": _CACHE,
    "cache": _CACHE,
    "cache_params": _CACHE,
    "cache_implementation": _CACHE,
    "cache_config": _CACHE,
    "max_cache_len": _CACHE,
    "continuous_batching_config": _CACHE,
    "prefill_chunk_size": "the session splits the prompt; give Session a prefill_chunk",
    "output_attentions": _PART,
    "output_hidden_states": _PART,
    "synced_gpus": "ranks with different hits would wait for each other for ever",
}
# What chooses, weighs, ends and reports tokens, and leaves the cache alone.
SERVED = frozenset(
    {
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "compile_config",
        "disable_compile",
        "do_sample",
        "early_stopping",
        "encoder_repetition_penalty",
        "eos_token_id",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "generation_config",
        "guidance_scale",
        "length_penalty",
        "logits_processor",
        "max_length",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "min_p",
        "negative_prompt_attention_mask",
        "negative_prompt_ids",
        "no_repeat_ngram_size",
        "num_beams",
        "num_return_sequences",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prefix_allowed_tokens_fn",
        "remove_invalid_values",
        "renormalize_logits",
        "repetition_penalty",
        "return_dict_in_generate",
        "sequence_bias",
        "stop_strings",
        "stopping_criteria",
        "streamer",
        "suppress_tokens",
        "temperature",
        "tokenizer",
        "top_h",
        "top_k",
        "top_p",
        "trust_remote_code",
        "typical_p",
        "use_cache",
        "watermarking_config",
    }
)
# What says something only beside an option that is refused, or for models of another kind.
IDLE = frozenset(
    {
        "assistant_confidence_threshold",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "decoder_start_token_id",
        "encoder_no_repeat_ngram_size",
        "low_memory",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "target_lookbehind",
        "transformers_version",
    }
)
