"""Ratios of a measurement to the limit that was measured beside it, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.10  # of the lower bound
DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """What was measured over rounds against its limit: medians, and the median of the paired ratios.

    ``low`` is the bound that a bootstrap over the rounds puts under that median: nine of ten
    such runs lie above it.
    """

    value: float
    limit: float
    ratio: float
    low: float

    @classmethod
    def of(cls, values: Sequence[float], limits: Sequence[float]) -> Ratio:
        """Of one value and one limit a round, both in the same order."""
        paired = np.asarray(values, float) / np.asarray(limits, float)
        return cls(
            float(np.median(values)), float(np.median(limits)), float(np.median(paired)), lower_bound(paired)
        )


def lower_bound(ratios: Sequence[float] | np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    """The 10% quantile of the medians of resampled rounds. Deterministic."""
    sample = np.asarray(ratios, float)
    picks = np.random.default_rng(0).integers(0, len(sample), (DRAWS, len(sample)))
    return float(np.quantile(np.median(sample[picks], axis=1), LEVEL))
