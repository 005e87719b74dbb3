"""TTFT by way, a panel for each case. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.engine.cases import Case
from bench.engine.results import Cell, find
from bench.engine.ways import Way

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 120
COLORS = {
    Way.RECOMPUTE: "tab:gray",
    Way.OWN_BLOCKS: "lightgray",
    Way.LAYERWISE: "tab:green",
    Way.CHUNKWISE: "tab:olive",
    Way.EXAMPLE: "tab:cyan",
    Way.EXAMPLE_TOLD: "tab:blue",
    Way.LMCACHE_CPU: "tab:purple",
    Way.LMCACHE_S3: "tab:orange",
}


def plot_engines(cells: Sequence[Cell], path: Path) -> None:
    """A row for each hit rate, a column for each length; whiskers are the extremes."""
    from matplotlib.figure import Figure

    contexts = sorted({cell.case.context_tokens for cell in cells})
    rates = sorted({cell.case.hit_rate for cell in cells})
    figure = Figure(figsize=(2 + 3.2 * len(contexts), 1 + 2.8 * len(rates)), layout="constrained")
    panels = figure.subplots(len(rates), len(contexts), squeeze=False)
    for rate, row in zip(rates, panels, strict=True):
        for context, axes in zip(contexts, row, strict=True):
            _panel(axes, cells, Case(context, rate))
    for axes in panels[-1]:
        axes.set_xlabel("TTFT, s")
    figure.suptitle("vLLM on CPU: TTFT by where the prefix comes from (medians, least and greatest)")
    figure.savefig(path, dpi=DPI)


def _panel(axes: Axes, cells: Sequence[Cell], case: Case) -> None:
    shown = [cell for way in Way if (cell := find(cells, case, way)) is not None]
    times = [cell.ttft_s for cell in shown]
    whiskers = [[each.median - each.min for each in times], [each.max - each.median for each in times]]
    axes.barh(
        [cell.way.title for cell in shown],
        [each.median for each in times],
        xerr=whiskers,
        capsize=2,
        color=[COLORS[cell.way] for cell in shown],
    )
    axes.invert_yaxis()
    axes.set_title(f"{case.title} of it stored")
    axes.grid(alpha=0.3, axis="x")
