"""The figures of a run: as a table, in sentences, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from benchmarks.prefill import Prefiller, Trial
from benchmarks.ways import Run, Ways
from kvstore.layout import DEEPSEEK_V3

# DeepSeek's figure for the first token of a 128K-token prompt without a cached prefix.
PUBLISHED_PREFILL_SECONDS = 13.0
PUBLISHED_TOKENS = 128 * 1024


@dataclass(frozen=True, slots=True)
class Result:
    """One length: the fastest prefill, and the ways of the cache."""

    prefill: Trial
    ways: Ways

    @property
    def best(self) -> dict[str, Run]:
        """The fastest run of each tier."""
        ways = {"disk": self.ways.disk, "host": self.ways.host, "device": self.ways.device}
        return {name: min(runs, key=lambda run: run.seconds) for name, runs in ways.items()}

    @property
    def prefill_seconds(self) -> float:
        """Time of the fastest prefill. That of the run which also stored counts too, if noise made it so."""
        return min(self.prefill.seconds, self.ways.cold.seconds)

    @property
    def prefill_form(self) -> str:
        """What that was."""
        alone = self.prefill.seconds <= self.ways.cold.seconds
        return str(self.prefill.form) if alone else "latentkv attention, in the session while it stored"

    @property
    def warm(self) -> list[Run]:
        """Every run that must answer as the cold one did."""
        return [*self.ways.disk, *self.ways.host, *self.ways.device, self.ways.mended]

    @property
    def identical(self) -> bool:
        """Whether every warm run had the logits of the cold one, to the bit."""
        return all(torch.equal(run.logits, self.ways.cold.logits) for run in self.warm)

    @property
    def max_logit_diff(self) -> float:
        """Largest difference of a logit between any warm run and the cold one."""
        return max(_difference(run.logits, self.ways.cold.logits) for run in self.warm)

    @property
    def control_changed(self) -> bool:
        """Whether one negated block changed the logits."""
        return not torch.equal(self.ways.control.logits, self.ways.cold.logits)

    @property
    def restarted(self) -> bool:
        """Whether every load from DISK came out of another process than the one that stored."""
        return all(restart.happened for restart in self.ways.restarts)


@dataclass(frozen=True, slots=True)
class Projection:
    """What the rate of DISK here would mean for a DeepSeek-V3 document of 128K tokens."""

    blocks: int
    nbytes: int
    bytes_a_second: float
    seconds: float
    published_prefill_seconds: float

    @classmethod
    def of(cls, result: Result) -> Projection:
        """From the measured rate of the best load from DISK."""
        blocks = DEEPSEEK_V3.blocks(PUBLISHED_TOKENS)
        nbytes = blocks * DEEPSEEK_V3.block_bytes
        rate = result.best["disk"].loaded.rate
        return cls(blocks, nbytes, rate, nbytes / rate, PUBLISHED_PREFILL_SECONDS)

    def __str__(self) -> str:
        return (
            f"Projection, not a measurement: at this disk's {_gb(self.bytes_a_second)} GB/s the"
            f" {_gb(self.nbytes)} GB ({self.blocks:,} blocks) of a 128K-token DeepSeek-V3 document would take"
            f" {self.seconds:.1f} s to load; DeepSeek's published prefill of one takes"
            f" {self.published_prefill_seconds:g} s."
        )


def table(results: Iterable[Result], title: str) -> Table:
    """All lengths and ways, the fastest run of each. Eighty columns are enough for it."""
    out = Table(title=title, title_style="bold", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    out.add_column("tokens", justify="right", no_wrap=True)
    out.add_column("way", no_wrap=True)
    for name in ("time", "gain", "hit", "computed", "loaded", "GB/s"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("logits", no_wrap=True)
    for result in results:
        length = f"{result.ways.tokens:,}"
        out.add_row(length, "prefill", _seconds(result.prefill_seconds), "1.0 x", "0", length, style="dim")
        for name, run in result.best.items():
            out.add_row("", *_row(result, name, run), end_section=name == "device")
    return out


def _row(result: Result, name: str, run: Run) -> tuple[str, ...]:
    loaded = run.loaded
    return (
        name.upper(),
        _seconds(run.seconds),
        f"{result.prefill_seconds / run.seconds:.1f} x",
        f"{run.hit:,}",
        f"{run.forwarded:,}",
        f"{loaded.nbytes / 1e6:,.0f} MB" if loaded.nbytes else "",
        _gb(loaded.rate) if loaded.nbytes else "",
        _verdict(run, result.ways.cold),
    )


def _verdict(run: Run, cold: Run) -> str:
    return (
        "identical"
        if torch.equal(run.logits, cold.logits)
        else f"± {_difference(run.logits, cold.logits):.2g}"
    )


def answers(result: Result, *, exact: bool) -> str:
    """One line: whether the answers were identical, and whether that could have been seen."""
    ways = result.ways
    control = "changes" if result.control_changed else "DOES NOT CHANGE"
    same = "identical to the bit" if result.identical else f"different by up to {result.max_logit_diff:.3g}"
    expected = "" if exact or result.identical else " (not exact mode: rounding)"
    return (
        f"Answers at {ways.tokens:,} tokens: logits with and without a hit are {same}{expected};"
        f" negating one loaded block {control} them."
    )


def to_json(results: list[Result], prefiller: Prefiller, about: dict[str, Any]) -> dict[str, Any]:
    """Everything: the longest document's figures on top, each length under ``lengths``."""
    return {
        **_summary(results[-1]),
        "projection": asdict(Projection.of(results[-1])) | {"note": "computed, not measured"},
        "about": about,
        "lengths": [_details(result) for result in results],
        "prefill_trials": [
            {
                "engine": trial.form.engine,
                "chunk": trial.form.chunk,
                "tokens": trial.tokens,
                "seconds": trial.seconds,
            }
            for trial in prefiller.trials
        ],
        "prefill_skipped": sorted(prefiller.skipped),
    }


def _summary(result: Result) -> dict[str, Any]:
    best = result.best
    return {
        "identical": result.identical,
        "max_logit_diff": result.max_logit_diff,
        "control_changed": result.control_changed,
        "tokens": result.ways.tokens,
        "hit_tokens": best["disk"].hit,
        "miss_tokens": best["disk"].miss,
        "forwarded_tokens": best["disk"].forwarded,
        "ttft_prefill_s": result.prefill_seconds,
        **{f"ttft_{name}_s": run.seconds for name, run in best.items()},
        "restarted": result.restarted,
    }


def _details(result: Result) -> dict[str, Any]:
    ways = result.ways
    return {
        **_summary(result),
        "prefill_form": result.prefill_form,
        "fastest_prefill_logit_diff": _difference(result.prefill.logits, ways.cold.logits),
        "cold_and_store": _run_json(ways.cold),
        "disk": [_run_json(run) for run in ways.disk],
        "host": [_run_json(run) for run in ways.host],
        "device": [_run_json(run) for run in ways.device],
        "control_max_logit_diff": _difference(ways.control.logits, ways.cold.logits),
        "daemon_disk_reads_blocks": ways.disk_reads,
        "restarts": [asdict(restart) | {"happened": restart.happened} for restart in ways.restarts],
    }


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "seconds": run.seconds,
        "hit_tokens": run.hit,
        "miss_tokens": run.miss,
        "forwarded_tokens": run.forwarded,
        "hit_tokens_by_tier": {str(tier): tokens for tier, tokens in run.by_tier.items()},
        "loaded_blocks": run.loaded.blocks,
        "loaded_bytes": run.loaded.nbytes,
        "load_opening_seconds": run.loaded.opening,
        "load_seconds": run.loaded.seconds,
        "load_bytes_per_second": run.loaded.rate,
    }


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"
