"""vLLM serves a small random model on this CPU, from prompt to logits, over a real daemon.

What is compared with is transformers' own answer, from one pass over prompt and answer.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not in this environment: make test-engines")

import torch
from transformers import DeepseekV3ForCausalLM

from mla.tiny import tiny_config
from tests.engines.checkpoint import damage_block
from tests.server.conftest import ROOT_DIR, DaemonProcess, Fleet

ROUNDING = 1e-3  # of logits of about 1 in fp32, computed in one pass or in several


def save_model(path: Path) -> DeepseekV3ForCausalLM:
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
    return model.eval()


@dataclass(frozen=True)
class Answer:
    """Blocks that came for it, loads that got less than they asked for, and what was answered."""

    loaded: int
    short: int
    tokens: list[int]
    logits: list[list[float]]  # of each token


@dataclass
class Site:
    """A daemon, and vLLM servers of one model over it, one after the other."""

    daemon: DaemonProcess
    data: Path
    scratch: Path

    def __post_init__(self) -> None:
        self.model = save_model(self.scratch / "model")

    def serve(self, *prompts: list[int]) -> list[Answer]:
        """The life of one server."""
        out = self.scratch / "out.json"
        given = [self.daemon.url, str(self.scratch / "model"), str(out), *map(json.dumps, prompts)]
        command = [sys.executable, "-m", "tests.engines.serve_vllm", *given]
        ended = subprocess.run(command, cwd=ROOT_DIR, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr[-4000:]
        return [Answer(**answer) for answer in json.loads(out.read_text())]

    @torch.no_grad()
    def error(self, prompt: list[int], answer: Answer) -> float:
        """How far its logits are from transformers' ones."""
        right = self.model(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
        return (torch.tensor(answer.logits) - right).abs().max().item()


@pytest.fixture
def site(fleet: Fleet, flags: Callable[..., list[str]], tmp_path: Path) -> Site:
    chosen = flags()
    return Site(fleet.daemon(*chosen), Path(chosen[chosen.index("--data") + 1]), tmp_path)


def test_hits_and_what_is_computed_again_give_the_right_logits(site: Site) -> None:
    text = random.Random(1).choices(range(256), k=700)
    (cold,) = site.serve(text)
    assert (cold.loaded, cold.short) == (0, 0)
    assert site.error(text, cold) < ROUNDING
    other = random.Random(2).choices(range(256), k=64) + text[64:]
    assert site.error(other, cold) > 100 * ROUNDING  # one block of other latents would show

    assert site.daemon.term() == 0
    site.daemon.start()
    part, whole = site.serve(text, text[:640])
    assert [(hit.loaded, hit.short) for hit in (part, whole)] == [(10, 0), (10, 0)]
    assert site.error(text, part) < ROUNDING
    assert site.error(text[:640], whole) < ROUNDING

    assert site.daemon.term() == 0
    damage_block(site.data, depth=6)
    site.daemon.start()
    (healed,) = site.serve(text)
    assert (healed.loaded, healed.short) == (5, 1)
    assert site.error(text, healed) < ROUNDING
