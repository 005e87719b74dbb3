"""Sections and chart of a result of `bench overlap`. Pure but for the chart's file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.core.show import Block, Json, Section, crossed, significant, table
from bench.experiments.overlap.grids import Origin
from calibration.charts import cell_ticks, chart
from calibration.compute.shapes import shape
from descriptors.units import GIB, KIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER_RATE_BYTES_PER_S = 2.5e9
"""Section 5.4, Figure 12: most configurations on the A100 need less."""
MARKS = {
    Origin.TABLE_A8.value: ("a", "as Table A8 gives it"),
    Origin.TABLES_A1_A2.value: (
        "b",
        "TTFTs of Tables A1 and A2, taken for compute, extended from G=16 and 512 to no missing chunk",
    ),
    Origin.MEASURED.value: ("m", "measured on this machine"),
    Origin.INTERPOLATED.value: ("i", "by the fitted cost model, between what it was fitted to"),
    Origin.EXTRAPOLATED.value: ("x", "by the fitted cost model, beyond what it was fitted to"),
    Origin.SCALED.value: ("s", "another model's fit, scaled by operations: the paper has no table of this model"),
}
"""One letter for tables, and what it means."""
TRANSFER_MARK = "!"
CERTAIN = (Origin.TABLE_A8.value, Origin.TABLES_A1_A2.value, Origin.MEASURED.value)
CACHED, COMPUTE, REQUIRED = "cached KV, GiB (A4)", "a layer's compute, ms (12, A5)", "B_req, GB/s (12, A7)"
QUANTITIES: dict[str, Callable[[Json], float]] = {
    CACHED: lambda cell: cell["total_bytes"] / GIB,
    COMPUTE: lambda cell: cell["layer_compute_s"] * 1e3,
    "operations, TFLOP/s (A6)": lambda cell: cell["operations_per_s"] / 1e12,
    REQUIRED: lambda cell: cell["required_bytes_per_s"] / 1e9,
}


def show(result: Json) -> dict[str, Section]:
    """Throughput, two heatmaps for each model and device, and the shares."""
    used = {cell["origin"] for grid in result["grids"].values() for cell in grid["cells"]}
    legend = [f"{mark}: {meaning}" for origin, (mark, meaning) in MARKS.items() if origin in used]
    if result["throughput"]:
        legend.append(f"{TRANSFER_MARK}: transfer-bound at this machine's throughput for layers of that size")
    throughput = table(
        result["throughput"],
        "layer-major delivery here, every byte compared: layers of = layer_bytes:size | "
        "GB/s = throughput_bytes_per_s:GB/s | samples = sample_count",
    )
    return {
        "throughput": (throughput, *(_compute(name, found) for name, found in result["compute"].items())),
        "grids": [block for grid in result["grids"].values() for block in _grid(grid, result["scaling_error"])],
        "shares": (*legend, *(_share(device, result) for device in result["share_compute_bound"])),
    }


def _compute(name: str, found: Json) -> str:
    times = [cell["duration_s"] for cell in found["cells"]]
    apart = statistics.median((each["max"] - each["min"]) / each["median"] for each in times)
    return (
        f"one layer of {shape(name).title} here ({found['device']}): {len(times)} prefills, "
        f"{found['cells'][0]['sample_count']} samples of each, which lie {apart:.0%} of their median apart"
    )


def _share(device: str, result: Json) -> str:
    count = sum(len(grid["cells"]) for grid in result["grids"].values() if grid["device"] == device)
    below, bound = result["share_below_2_5_gbytes_per_s"][device], result["share_compute_bound"][device]
    paper = " (paper: most)" if device == "A100" else ""
    here = "" if bound is None else f"; {bound:.0%} are compute-bound at what this machine moves"
    return f"{device}: {below:.0%} of {count} cells need at most 2.5 GB/s{paper}{here}"


def _grid(grid: Json, scaling_errors: Json) -> Iterator[Block]:
    if grid["fit_error_median"] is None:
        error = f", which on the model that can be compared is off by up to {scaling_errors[grid['device']]:.0%}"
    else:
        error = f", off by {grid['fit_error_median']:.1%} in the median, {grid['fit_error_greatest']:.1%} at most"
    yield f"{shape(grid['model']).title} on {grid['device']} (fitted to {grid['fitted_to']}{error})"
    for quantity in (COMPUTE, REQUIRED):
        yield crossed(
            grid["cells"],
            f"{quantity}, by context and hit rate",
            lambda cell: f"{cell['context_tokens'] // KIB}K",
            lambda cell: f"{cell['hit_rate']:.1%}",
            partial(_marked, quantity),
        )


def _marked(quantity: str, cell: Json) -> str:
    """With where it comes from."""
    mark = TRANSFER_MARK if _is_marked(quantity, cell) else ""
    return f"{significant(QUANTITIES[quantity](cell))}{MARKS[cell['origin']][0]}{mark}"


def _is_marked(quantity: str, cell: Json) -> bool:
    return quantity == REQUIRED and cell.get("bound") == "transfer"


def plot(result: Json, path: Path) -> None:
    """Figures 12 and A4 to A7 as heatmaps, a row of panels for each model and device. Framed: transfer-bound here.
    Bold: from a table or measured.
    """
    grids = list(result["grids"].values())
    rows, columns = len(grids), len(QUANTITIES)
    title = "Layerwise overlap. Bold: from a table or measured. Framed: transfer-bound on this machine"
    with chart(path, title, (4 * columns, 2.2 * rows + 1), rows, columns) as panels:
        for grid, row_panels in zip(grids, panels, strict=True):
            for quantity, axes in zip(QUANTITIES, row_panels, strict=True):
                _draw(axes, quantity, grid["cells"])
            row_panels[0].set_ylabel(f"{shape(grid['model']).title}, {grid['device']}\ncontext", fontsize=9)
        for quantity, axes in zip(QUANTITIES, panels[0], strict=True):
            axes.set_title(quantity, fontsize=10)
        for axes in panels[-1]:
            axes.set_xlabel("hit rate, %", fontsize=9)


def _draw(axes: Axes, quantity: str, cells: list[Json]) -> None:
    from matplotlib.patches import Rectangle

    contexts, hit_rates = (list(dict.fromkeys(cell[name] for cell in cells)) for name in ("context_tokens", "hit_rate"))
    values = np.array([QUANTITIES[quantity](cell) for cell in cells]).reshape(len(contexts), len(hit_rates))
    for index, (cell, value) in enumerate(zip(cells, values.flat, strict=True)):
        y, x = divmod(index, len(hit_rates))
        weight = "bold" if cell["origin"] in CERTAIN and quantity != CACHED else "normal"
        said = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
        axes.text(x, y, said, ha="center", va="center", fontsize=7, fontweight=weight)
        if _is_marked(quantity, cell):
            axes.add_patch(Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, fill=False, edgecolor="black", linewidth=1.5))
    axes.imshow(np.log(values), aspect="auto", cmap="RdYlGn_r" if quantity == REQUIRED else "YlGnBu", alpha=0.6)
    cell_ticks(axes, [f"{100 * hit_rate:g}" for hit_rate in hit_rates], fontsize=7)
    axes.set_yticks(range(len(contexts)), [f"{context // KIB}K" for context in contexts], fontsize=7)
