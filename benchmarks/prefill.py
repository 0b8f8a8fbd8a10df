"""Re-prefill in its fastest form: the way to the first token that a cache has to beat."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from benchmarks.documents import Tokens
from benchmarks.memory import available_bytes
from benchmarks.models import Subject
from mla import LatentCache, LatentPool, attach, detach
from mla.adapters.transformers import cache_argument

CHUNKS = (512, 1024, 2048, 4096)  # tokens; larger ones are tried as long as they help
# Lengths in tokens at which the forms for longer documents are picked: an engine whose
# best is slower than so many times the fastest is not tried on more tokens.
PROBES = {4096: 3.0, 8192: 1.5}
PATIENT = 16384  # longest document that is prefilled more than once


class Engine(StrEnum):
    """Whose attention computes the prefill."""

    SDPA = "stock sdpa"
    EAGER = "stock eager"
    LATENT = "latentkv attention"


@dataclass(frozen=True, slots=True)
class Form:
    """A way to prefill: an engine, and how many tokens it is given at once."""

    engine: Engine
    chunk: int

    def __str__(self) -> str:
        return f"{self.engine}, {self.chunk:,} tokens at once"


@dataclass(frozen=True, slots=True)
class Trial:
    """One timed prefill; ``logits [vocabulary]`` are those of the first new token."""

    form: Form
    tokens: int
    seconds: float
    logits: Tensor = field(repr=False)


class Prefiller:
    """Prefills without any store, in every form, and remembers what it took."""

    def __init__(self, subject: Subject, *, repeats: int, announce: Callable[[str, int], None]) -> None:
        self._subject = subject
        self._repeats = repeats
        self._announce = announce
        self._pool: LatentPool | None = None
        self._warm = False
        self.trials: list[Trial] = []
        self.skipped: set[str] = set()

    def fastest(self, tokens: Tokens) -> Trial:
        """The fastest prefill of a document.

        Every form is tried on its first tokens, and the best of each engine on more and
        more of them while it is in the race: up to the whole document, or if that is
        longer than ``PATIENT`` only the winner is.
        """
        forms = _forms(len(tokens))
        for length, limit in PROBES.items():
            if length < len(tokens):
                forms = self._race(forms, tokens[:length], limit)
        if len(tokens) <= PATIENT:
            forms = self._race(forms, tokens, 1.0)
        return self._again(forms[0], tokens)

    def _race(self, forms: Iterable[Form], tokens: Tokens, limit: float) -> list[Form]:
        """The best form of each engine within ``limit`` times the fastest, fastest first."""
        trials = sorted((self._try(form, tokens) for form in forms), key=_seconds)
        trials.insert(0, self._enlarge(trials[0], tokens))
        best: dict[Engine, Form] = {}
        for trial in trials:
            if trial.seconds <= limit * trials[0].seconds:
                best.setdefault(trial.form.engine, trial.form)
        return list(best.values())

    def _enlarge(self, best: Trial, tokens: Tokens) -> Trial:
        """Double the chunk for as long as that is faster, if the largest was the best so far."""
        while best.form.chunk >= CHUNKS[-1] and 2 * best.form.chunk <= len(tokens):
            larger = self._try(Form(best.form.engine, 2 * best.form.chunk), tokens)
            if larger.seconds >= best.seconds:
                break
            best = larger
        return best

    def _again(self, form: Form, tokens: Tokens) -> Trial:
        form = self._fitting(form, len(tokens))
        trials = self._known(form, len(tokens))
        runs = self._repeats if len(tokens) <= PATIENT else 1
        trials += [self._time(form, tokens) for _ in range(runs - len(trials))]
        return min(trials, key=_seconds)

    def _known(self, form: Form, length: int) -> list[Trial]:
        return [trial for trial in self.trials if (trial.form, trial.tokens) == (form, length)]

    def _try(self, form: Form, tokens: Tokens) -> Trial:
        """A trial, made now or before, of a form or the nearest one that fits into memory."""
        form = self._fitting(form, len(tokens))
        known = self._known(form, len(tokens))
        return known[0] if known else self._time(form, tokens)

    def _fitting(self, form: Form, length: int) -> Form:
        while not self._fits(form, length):
            self.skipped.add(f"{form}, of {length:,}: the scores need too much memory")
            smaller = form.chunk // 2
            form = Form(form.engine, smaller) if smaller >= CHUNKS[0] else Form(Engine.LATENT, CHUNKS[-1])
        return form

    def _fits(self, form: Form, length: int) -> bool:
        # Stock attention makes the whole matrix of scores, in fp32 and in the model's dtype.
        heads = int(self._subject.model.config.num_attention_heads)
        scores = heads * form.chunk * length * 10
        return form.engine is Engine.LATENT or scores < available_bytes(self._subject.model.device) // 2

    def _time(self, form: Form, tokens: Tokens) -> Trial:
        if not self._warm:  # the first forward of a process allocates and picks kernels
            self._warm = True
            self._run(form, tokens[: CHUNKS[0]])
        self._announce(f"prefill, {form}", len(tokens))
        trial = self._run(form, tokens)
        self.trials.append(trial)
        return trial

    def _run(self, form: Form, tokens: Tokens) -> Trial:
        model = self._subject.model
        if form.engine is not Engine.LATENT:
            model.set_attn_implementation(form.engine.split()[1])
            return self._forward(form, tokens, DynamicCache(config=model.config))
        attach(model)
        try:
            with LatentCache(self._pool_for(len(tokens))) as cache:
                return self._forward(form, tokens, cache)
        finally:
            detach(model)

    def _pool_for(self, tokens: int) -> LatentPool:
        layout = self._subject.info.layout
        blocks = -(-tokens // layout.block_tokens)
        if self._pool is None or self._pool.num_blocks < blocks:
            self._pool = LatentPool(layout, blocks, self._subject.model.device)
            self._pool.data.fill_(0)  # so that no run pays for touching its memory first
        return self._pool

    def _forward(self, form: Form, tokens: Tokens, cache: Cache) -> Trial:
        model: Any = self._subject.model
        ids = torch.from_numpy(tokens.astype(np.int64))[None].to(model.device)
        options = {cache_argument(model): cache, "use_cache": True}
        last = (len(tokens) - 1) // form.chunk * form.chunk
        start = time.perf_counter()
        with torch.inference_mode():
            for at in range(0, last, form.chunk):
                model.base_model(input_ids=ids[:, at : at + form.chunk], **options)
            logits = model(input_ids=ids[:, last:], logits_to_keep=1, **options).logits[0, -1]
            int(logits.argmax())  # the first token has to be known, so a GPU is waited for
        return Trial(form, len(tokens), time.perf_counter() - start, logits.float().cpu())


def _forms(length: int) -> list[Form]:
    chunks = [chunk for chunk in CHUNKS if chunk <= length] or CHUNKS[:1]
    return [Form(engine, chunk) for engine in Engine for chunk in chunks]


def _seconds(trial: Trial) -> float:
    return trial.seconds
