"""Sessions over very small models, stores and daemons for them, and counts taken at the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvstore
from kvstore.api import KVStore
from kvstore.embedded import Embedded
from mla.session import Session
from mla.usage import Generation
from tests.mla.zoo import build, tokens
from tests.server.conftest import flags, fleet  # noqa: F401 - fixtures

MIB = 1 << 20


def text(count: int, seed: int = 0) -> list[int]:
    """Random token ids; different seeds part at the first token."""
    return tokens(count, seed)[0].tolist()


class Worker:
    """A session whose every answer is checked against what its model really forwarded."""

    def __init__(self, model: PreTrainedModel, store: KVStore | None, **settings: Any) -> None:
        self.model = model
        self.session = Session(model, store, **{"prefill_chunk": 128, "pool_tokens": 8192} | settings)

    def ask(self, prompt: list[int], new: int = 1, **options: Any) -> Generation:
        seen: list[Tensor] = []
        embedding = self.model.get_input_embeddings()
        with embedding.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0])):
            answer = self.session.generate(
                prompt, max_new_tokens=new, do_sample=False, output_logits=True, **options
            )
        usage = answer.usage
        # The last sampled token is never forwarded.
        assert (
            sum(ids.shape[1] for ids in seen) == usage.prompt_cache_miss_tokens + usage.completion_tokens - 1
        )
        assert usage.prompt_cache_hit_tokens + usage.prompt_cache_miss_tokens == usage.prompt_tokens
        assert usage.prompt_tokens == len(prompt)
        assert sum(usage.hit_tokens_by_tier.values()) == usage.prompt_cache_hit_tokens
        return answer

    def hit(self, prompt: list[int]) -> int:
        """Hit tokens of a prompt that is answered by one token."""
        return self.ask(prompt).usage.prompt_cache_hit_tokens


def logits(answer: Generation) -> Tensor:
    """``[new, vocab]``."""
    assert answer.logits is not None
    return torch.cat(answer.logits)


Workers = Callable[..., Worker]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Two layers, one dense and one MoE, fp32."""
    return build("deepseek_v3")


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Makes workers and closes their sessions."""
    made: list[Worker] = []

    def make(model: PreTrainedModel, store: KVStore | None, **settings: Any) -> Worker:
        made.append(Worker(model, store, **settings))
        return made[-1]

    yield make
    for worker in made:
        worker.session.close(timeout=10)


@pytest.fixture
def embedded(tmp_path: Any) -> Iterator[Callable[..., Embedded]]:
    """Opens embedded stores of one data directory, the last one closing the one before."""
    opened: list[Embedded] = []

    def reopen(**settings: Any) -> Embedded:
        for store in opened:
            store.close()
        chosen = {"host_bytes": 16 * MIB, "disk_bytes": 64 * MIB, "interval": 256} | settings
        opened.append(kvstore.open(tmp_path / "data", **chosen))
        return opened[-1]

    yield reopen
    for store in opened:
        store.close()
