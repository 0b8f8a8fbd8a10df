"""The picture: time to the first token over the length of the document, a curve for each way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.report import Result

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

_LINE_POINTS = 12.0  # of a label
CURVES = {
    "prefill": ("prefill again (fastest form)", "#c0392b", "o"),
    "disk": ("load from DISK (after a restart)", "#2c6fbb", "s"),
    "host": ("load from HOST (daemon's memory)", "#2e8b57", "^"),
    "device": ("already on the DEVICE", "#8e6bbf", "D"),
}


def draw(results: list[Result], path: Path, subtitle: str) -> None:
    """Write a PNG of the fastest run of each way at each length."""
    figure, axes = pyplot.subplots(figsize=(8.6, 5.4), dpi=150, layout="constrained")
    lengths = [result.ways.tokens for result in results]
    for name, (label, colour, marker) in CURVES.items():
        seconds = [_seconds(result, name) for result in results]
        axes.plot(lengths, seconds, color=colour, marker=marker, markersize=6, linewidth=2, label=label)
    _scale(axes, lengths)
    _label_ends(figure, axes, results[-1])
    axes.set_title("Time to the first new token of a cached document", fontsize=13, fontweight="bold", pad=24)
    axes.text(0.5, 1.025, subtitle, transform=axes.transAxes, ha="center", fontsize=8.5, color="#555555")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    figure.savefig(path)
    pyplot.close(figure)


def _label_ends(figure: Any, axes: Any, last: Result) -> None:
    """The times of the longest document beside the curves' ends, none over another."""
    ends = sorted((_seconds(last, name), colour) for name, (_, colour, _) in CURVES.items())
    free = 0.0  # lowest place, in points, that is not taken
    for seconds, colour in ends:
        at = axes.transData.transform((last.ways.tokens, seconds))[1] * 72 / figure.dpi
        lift = max(free - at, 0.0)
        free = at + lift + _LINE_POINTS
        axes.annotate(
            _time(seconds, digits=2),
            (last.ways.tokens, seconds),
            xytext=(9, lift),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9,
        )


def _seconds(result: Result, name: str) -> float:
    return result.prefill_seconds if name == "prefill" else result.best[name].seconds


def _scale(axes: Any, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("length of the document [tokens]")
    axes.set_ylabel("time to the first new token")
    axes.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.3)
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.2, high * 2.5)  # room for the legend
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{int(tokens):,}"))
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=30))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: _time(seconds, digits=0)))
    axes.grid(which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _time(seconds: float, digits: int) -> str:
    if seconds >= 1:
        return f"{seconds:.{digits}f} s"
    return f"{seconds * 1000:.0f} ms"
