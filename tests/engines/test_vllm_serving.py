"""vLLM serves a small random model on this CPU, from prompt to logits, over a real daemon.

vLLM's CPU kernels for MLA give other logits in decoding, and in a prefill behind a cached prefix,
than in a prefill of everything, with no connector at all. So a hit whose last token is decoded is
compared with decoding that token behind the same prompt without a hit; and the block that is damaged
is the first one, so that all is prefilled again. (test_vllm.py damages one in the middle.)
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not in this environment: make test-engines")

import torch
from transformers import DeepseekV3ForCausalLM

from mla.tiny import tiny_config
from tests.engines.checkpoint import damage_block
from tests.server.conftest import ROOT_DIR, Fleet

ROUNDING = 1e-3  # of logits of about 1 in fp32, computed in one pass or in two


def save_model(path: Path) -> None:
    """A dense model whose attention picks out tokens; a choice of experts would not be smooth."""
    torch.manual_seed(0)
    config = tiny_config()
    config.first_k_dense_replace = config.num_hidden_layers
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=(2.0 if "q_b" in name else 1.0) / math.sqrt(weight.shape[-1]))
    model.save_pretrained(path)


def serve(url: str, model: Path, out: Path, *requests: tuple[list[int], int | None]) -> list[dict[str, Any]]:
    """The life of one server; its answers to prompts and tokens decoded behind them."""
    command = [sys.executable, "-m", "tests.engines.serve_vllm", url, str(model), str(out)]
    arguments = [json.dumps({"prompt": prompt, "decoded": decoded}) for prompt, decoded in requests]
    ended = subprocess.run([*command, *arguments], cwd=ROOT_DIR, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(out.read_text())


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in zip(one["logits"], other["logits"], strict=True))


def test_a_hit_gives_the_logits_of_no_hit_and_a_corrupt_block_is_computed_again(
    fleet: Fleet, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    chosen = flags()
    daemon = fleet.daemon(*chosen)
    model, out = tmp_path / "model", tmp_path / "out.json"
    save_model(model)
    text = random.Random(1).choices(range(256), k=640)
    other = random.Random(2).choices(range(256), k=64) + text[64:]
    cold, different = serve(daemon.url, model, out, (text, 7), (other, 7))
    assert (different["loaded"], different["short"]) == (0, 0)
    assert distance(cold, different) > 10 * ROUNDING  # one block of other latents would show

    assert daemon.term() == 0
    daemon.start()
    (warm,) = serve(daemon.url, model, out, ([*text, 7], None))
    assert (warm["loaded"], warm["short"]) == (10, 0)
    assert distance(warm, cold) < ROUNDING

    assert daemon.term() == 0
    damage_block(Path(chosen[chosen.index("--data") + 1]), depth=1)
    daemon.start()
    (healed,) = serve(daemon.url, model, out, (text, 7))
    assert (healed["loaded"], healed["short"]) == (0, 1)
    assert distance(healed, cold) < ROUNDING
