"""Pictures of the benchmarks of the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.data_path_report import WAYS, pairs
from benchmarks.data_path_rounds import Round

matplotlib.use("Agg")

from matplotlib import pyplot

_COLOURS = ("#2c6fbb", "#2e8b57", "#c0392b", "#8e6bbf")


def draw_ratios(rounds: Sequence[Round], path: Path, subtitle: str) -> None:
    """Each way as a share of its limit, a point a round, the median as a line."""
    figure, axes = _figure("Share of what disk and memory can do", subtitle)
    for place, (way, colour) in enumerate(zip(WAYS, _COLOURS, strict=True)):
        values, limits = pairs(way, rounds)
        shares = sorted(value / limit for value, limit in zip(values, limits, strict=True))
        middle = shares[len(shares) // 2]
        axes.plot([place] * len(shares), shares, "o", color=colour, alpha=0.45)
        axes.plot([place - 0.25, place + 0.25], [middle, middle], color=colour, linewidth=3)
        axes.annotate(f"{middle:.2f}", (place + 0.28, middle), va="center", color=colour)
    axes.axhline(1.0, color="#888888", linewidth=1, linestyle="--")
    axes.set_xticks(range(len(WAYS)), [f"{way}\nof {what}" for way, (_, what) in WAYS.items()])
    axes.set_ylabel("ours / limit")
    axes.set_ylim(bottom=0)
    _save(figure, path)


def draw_lines(
    series: Mapping[str, Sequence[float]],
    x: Sequence[float],
    labels: tuple[str, str],
    path: Path,
    title: str,
    subtitle: str,
) -> None:
    """Curves over common points; ``labels`` of the axes x and y."""
    figure, axes = _figure(title, subtitle)
    for (name, values), colour in zip(series.items(), _COLOURS, strict=False):
        axes.plot(x, values, "o-", color=colour, label=name)
    axes.set_xticks(x)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _save(figure, path)


def _figure(title: str, subtitle: str) -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(figsize=(8.6, 5.0), dpi=150, layout="constrained")
    axes.set_title(title, fontsize=13, fontweight="bold", pad=24)
    axes.text(0.5, 1.025, subtitle, transform=axes.transAxes, ha="center", fontsize=8.5, color="#555555")
    axes.grid(which="major", axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
