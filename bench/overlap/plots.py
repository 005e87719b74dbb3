"""Figures 12 and A4 to A7 as one chart of heatmaps. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.overlap.report import is_transfer_bound
from bench.overlap.requirements import Grid, Origin, Requirement
from bench.overlap.run import OverlapReport
from descriptors.units import GIB, KIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 110
CERTAIN = (Origin.TABLE_A8, Origin.TABLES_A1_A2, Origin.MEASURED)


@dataclass(frozen=True, slots=True)
class _Quantity:
    """What a column of panels shows; `value` gives it in the unit of the title."""

    title: str
    value: Callable[[Grid, Requirement], float]


CACHED = _Quantity("cached KV, GiB (A4)", lambda grid, cell: cell.layer_bytes * grid.shape.num_layers / GIB)
REQUIRED = _Quantity("B_req, GB/s (12, A7)", lambda _, cell: cell.required_bytes_per_s / 1e9)
QUANTITIES = (
    CACHED,
    _Quantity("a layer's compute, ms (12, A5)", lambda _, cell: cell.layer_compute_s * 1e3),
    _Quantity("operations, TFLOP/s (A6)", lambda grid, cell: grid.operations_per_s(cell) / 1e12),
    REQUIRED,
)


def plot_overlap(report: OverlapReport, path: Path) -> None:
    """A row of panels for each model and device. Framed: transfer-bound here. Bold: from a table or measured."""
    from matplotlib.figure import Figure

    rows = len(report.grids)
    figure = Figure(figsize=(4 * len(QUANTITIES), 2.2 * rows + 1), layout="constrained")
    panels = figure.subplots(rows, len(QUANTITIES), squeeze=False)
    for grid, row_panels in zip(report.grids, panels, strict=True):
        for quantity, axes in zip(QUANTITIES, row_panels, strict=True):
            _draw(axes, quantity, grid, report)
        row_panels[0].set_ylabel(f"{grid.shape.title}, {grid.device}\ncontext", fontsize=9)
    for quantity, axes in zip(QUANTITIES, panels[0], strict=True):
        axes.set_title(quantity.title, fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("hit rate, %", fontsize=9)
    figure.suptitle("Layerwise overlap. Bold: from a table or measured. Framed: transfer-bound on this machine")
    figure.savefig(path, dpi=DPI)


def _draw(axes: Axes, quantity: _Quantity, grid: Grid, report: OverlapReport) -> None:
    from matplotlib.patches import Rectangle

    contexts = list(dict.fromkeys(cell.context_tokens for cell in grid.cells))
    hit_rates = list(dict.fromkeys(cell.hit_rate for cell in grid.cells))
    values = np.full((len(contexts), len(hit_rates)), np.nan)
    for cell in grid.cells:
        place = contexts.index(cell.context_tokens), hit_rates.index(cell.hit_rate)
        values[place] = quantity.value(grid, cell)
    axes.imshow(np.log(values), aspect="auto", cmap="RdYlGn_r" if quantity is REQUIRED else "YlGnBu", alpha=0.6)
    for cell in grid.cells:
        y, x = contexts.index(cell.context_tokens), hit_rates.index(cell.hit_rate)
        weight = "bold" if cell.origin in CERTAIN and quantity is not CACHED else "normal"
        axes.text(x, y, _said(values[y, x]), ha="center", va="center", fontsize=7, fontweight=weight)
        if quantity is REQUIRED and is_transfer_bound(cell, report):
            axes.add_patch(Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, fill=False, edgecolor="black", linewidth=1.5))
    axes.set_xticks(range(len(hit_rates)), [f"{100 * hit_rate:g}" for hit_rate in hit_rates], fontsize=7)
    axes.set_yticks(range(len(contexts)), [f"{context // KIB}K" for context in contexts], fontsize=7)


def _said(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
