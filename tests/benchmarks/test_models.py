"""Random weights at the geometry of DeepSeek-V2-Lite, with fewer and smaller layers for a CPU."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from benchmarks.models import random_subject, v2_lite_config
from benchmarks.prefill import Engine, Prefiller
from kvstore.layout import preset
from mla import Session


def test_the_real_size_has_the_layout_of_v2_lite():
    config = v2_lite_config()
    layout = preset("deepseek-v2-lite")
    assert (config.num_hidden_layers, config.kv_lora_rank) == (layout.num_layers, layout.latent_rank)
    assert config.qk_rope_head_dim == layout.rope_dim
    assert config.max_position_embeddings > 131072
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert round(sum(weight.numel() for weight in model.parameters()) / 1e9, 1) == 15.7


def test_a_small_one_is_prefilled_in_all_forms_and_depends_on_its_whole_document():
    config = v2_lite_config()
    config.update(
        {
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "vocab_size": 256,
        }
    )
    subject = random_subject("small", config, torch.device("cpu"))
    assert subject.model.dtype == torch.bfloat16
    assert subject.info.layout.entry_bytes == preset("deepseek-v2-lite").entry_bytes
    tokens = subject.tokenize(bytes(range(256)) * 2)
    prefiller = Prefiller(subject, repeats=1, announce=lambda text, count: None)
    prefiller.fastest(tokens)
    assert {trial.form.engine for trial in prefiller.trials} == set(Engine)
    with Session(subject.model, None, pool_tokens=1024) as session:
        answers = []
        for prompt in (tokens, [*tokens[:-64], 7, *tokens[-63:]], [*tokens[:100], 7, *tokens[101:]]):
            answer = session.generate(prompt, max_new_tokens=1, do_sample=False, output_logits=True)
            answers.append(answer.logits[0][0])
    assert not torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])
