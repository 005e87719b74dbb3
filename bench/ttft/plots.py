"""A chart for each of the figures. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.paper import MARGIN_BYTES_PER_S
from bench.ttft.cases import Case, System
from bench.ttft.knee import falling_curve
from bench.ttft.results import Cell, Overhead, Sweep, increases, overheads
from bench.ttft.run import Ttft, TtftSettings
from descriptors.units import gbps_from_bytes_per_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 120
COLORS = {
    System.LOCAL_DRAM_CW: "tab:gray",
    System.LOCAL_DRAM_LW: "tab:blue",
    System.S3_BATCH_CW: "tab:orange",
    System.S3_AGG_LW: "tab:green",
}


def plot_figures(settings: TtftSettings, found: Ttft, folder: Path) -> None:
    """Draw what was measured into files of the folder."""
    over = overheads(found.cells, settings.link_bytes_per_s)
    if over:
        _bars(over, "TTFT over opt-local-LW, %", "Figure 13", folder / "figure-13.png")
    capped = increases(found.cells, settings.link_bytes_per_s, settings.cap_bytes_per_s)
    if capped:
        gbps = gbps_from_bytes_per_s(settings.cap_bytes_per_s)
        _bars(capped, f"TTFT at {gbps:g} Gbps over the full link's, %", "Figure 14", folder / "figure-14.png")
    if found.sweeps:
        _sweeps(found.sweeps, folder / "figure-15.png")


def _bars(found: Sequence[tuple[Cell, Overhead]], what: str, title: str, path: Path) -> None:
    """A panel for each context and hit rate; whiskers are the extremes."""
    from matplotlib.figure import Figure

    contexts = list(dict.fromkeys(cell.case.context for cell, _ in found))
    hits = list(dict.fromkeys(cell.case.hit for cell, _ in found))
    figure = Figure(figsize=(3 + 3.2 * len(hits), 1 + 3.0 * len(contexts)), layout="constrained")
    panels = figure.subplots(len(contexts), len(hits), squeeze=False)
    for context, row in zip(contexts, panels, strict=True):
        for hit, axes in zip(hits, row, strict=True):
            here = [each for each in found if (each[0].case.context, each[0].case.hit) == (context, hit)]
            _panel(axes, here)
            axes.set_title(f"{context}, {hit} %")
    for row in panels:
        row[0].set_ylabel(what)
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=8)
    count = min(over.sample_count for _, over in found)
    figure.suptitle(f"{title} ({count} samples, medians of ratios within a round, least and greatest)")
    figure.savefig(path, dpi=DPI)


def _panel(axes: Axes, found: Sequence[tuple[Cell, Overhead]]) -> None:
    systems = list(dict.fromkeys(cell.system for cell, _ in found))
    grains = sorted({cell.case.chunk_tokens for cell, _ in found})
    width = 0.8 / len(systems)
    for place, system in enumerate(systems):
        ours = [(cell.case.chunk_tokens, over.ratio) for cell, over in found if cell.system is system]
        at = [grains.index(grain) + width * (place - (len(systems) - 1) / 2) for grain, _ in ours]
        heights = [100 * (ratio.median - 1) for _, ratio in ours]
        whiskers = [
            [100 * (ratio.median - ratio.min) for _, ratio in ours],
            [100 * (ratio.max - ratio.median) for _, ratio in ours],
        ]
        axes.bar(at, heights, width, yerr=whiskers, capsize=2, color=COLORS[system], label=system.title)
    axes.set_xticks(range(len(grains)), [f"G={grain}" for grain in grains])
    axes.grid(alpha=0.3, axis="y")


def _sweeps(sweeps: Sequence[Sweep], path: Path) -> None:
    """A panel for each workload: TTFT over its best, and r*, the paper's target and the knee as lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 4 * len(sweeps), 4), layout="constrained")
    for sweep, axes in zip(sweeps, figure.subplots(1, len(sweeps), squeeze=False)[0], strict=True):
        _sweep_panel(axes, sweep)
    figure.suptitle("Figure 15: S3Agg-LW under throttled rates")
    figure.savefig(path, dpi=DPI)


def _sweep_panel(axes: Axes, sweep: Sweep) -> None:
    curve = falling_curve(sweep.samples)
    best_s = min(each.ttft_s for each in curve)
    star = gbps_from_bytes_per_s(sweep.case.zero_stall_bytes_per_s)
    axes.scatter(
        [gbps_from_bytes_per_s(each.rate_bytes_per_s) for each in sweep.samples],
        [100 * (each.ttft_s / best_s - 1) for each in sweep.samples],
        s=8,
        alpha=0.5,
    )
    axes.plot(
        [gbps_from_bytes_per_s(each.rate_bytes_per_s) for each in curve],
        [100 * (each.ttft_s / best_s - 1) for each in curve],
    )
    axes.axvline(star, linestyle="--", color="black", label="r*")
    axes.axvline(star + gbps_from_bytes_per_s(MARGIN_BYTES_PER_S), linestyle="-.", color="tab:red", label="r* + 5 Gbps")
    if sweep.knee is not None:
        knee = sweep.knee
        axes.axvline(gbps_from_bytes_per_s(knee.rate_bytes_per_s), linestyle=":", color="tab:green", label="knee")
        axes.axvspan(
            gbps_from_bytes_per_s(knee.low_bytes_per_s),
            gbps_from_bytes_per_s(knee.high_bytes_per_s),
            color="tab:green",
            alpha=0.15,
        )
    axes.set_title(_sweep_title(sweep.case))
    axes.set_xlabel("Gbps, unscaled")
    axes.set_ylabel("TTFT over the best rate's, %")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _sweep_title(case: Case) -> str:
    return f"{case.context}, {case.hit} %, G={case.chunk_tokens}"
