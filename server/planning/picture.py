"""The plan as a picture: hit rate over size. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from server.planning.sizing import Plan

matplotlib.use("Agg")

from matplotlib import pyplot


def draw(plan: Plan, path: Path, title: str) -> None:
    """Write a PNG."""
    figure, axes = pyplot.subplots(figsize=(8.6, 5.0), dpi=120, layout="constrained")
    sizes = [row.nbytes / 1e9 for row in plan.rows]
    for rates, label, colour, line in (
        ([row.optimum for row in plan.rows], "best possible (Belady)", "#888888", "--"),
        ([row.block for row in plan.rows], "policy block", "#2c6fbb", "-"),
        ([row.unit for row in plan.rows], "policy unit", "#2e8b57", "-"),
    ):
        axes.plot(sizes, [100 * rate for rate in rates], line, marker="o", color=colour, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("size of the cache [GB]")
    axes.set_ylabel("hit rate [% of the blocks asked for]")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=12)
    axes.grid(which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
