"""The overlap report for people and as plain values. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.ladder.results import cell_json
from bench.overlap.grids import PAPER_DEVICES, scaling_error
from bench.overlap.requirements import Bound, Grid, Origin, Requirement, share_below
from bench.overlap.run import OverlapReport
from bench.overlap.throughput import rate_at
from bench.report import format_bytes
from descriptors.units import KIB

PAPER_RATE_BYTES_PER_S = 2.5e9
"""Section 5.4, Figure 12: most configurations on the A100 need less."""
TRANSFER_MARK = "!"
CELL_WIDTH = 12


def overlap_table(report: OverlapReport) -> str:
    """Throughput, two heatmaps for each model and device, and the shares."""
    lines = [f"{name}: {value}" for name, value in {**report.origin, "settings": report.settings}.items()]
    lines += ["", "layer-major delivery from a server here, every byte compared"]
    for rate in report.rates:
        samples = sorted(rate.cell.nbytes / seconds / 1e9 for seconds in rate.cell.samples_s)
        lines.append(
            f"  layers of {format_bytes(rate.layer_bytes):>8}: {rate.bytes_per_s / 1e9:.3f} GB/s, "
            f"{samples[0]:.3f} to {samples[-1]:.3f} in {len(samples)} samples"
        )
    for each in report.computes:
        count = len(each.cells[0].samples_s)
        lines.append(
            f"one layer of {each.shape.title} here ({each.device}): {len(each.cells)} prefills, {count} samples of "
            f"each, which lie {100 * each.spread:.0f} % of their median apart"
        )
    lines += [line for grid in report.grids for line in _grid_lines(grid, report)]
    used = {cell.origin for grid in report.grids for cell in grid.cells}
    lines += ["", *(f"{origin.mark}: {origin.meaning}" for origin in Origin if origin in used)]
    if report.rates:
        lines.append(f"{TRANSFER_MARK}: transfer-bound at this machine's throughput for layers of that size")
    lines += ["", *_summary(report)]
    lines.append("every byte verified" if report.problem is None else report.problem)
    return "\n".join(lines)


def overlap_json(report: OverlapReport) -> dict[str, Any]:
    """The report as plain values, raw samples included."""
    return {
        "bench": "overlap",
        "verified": report.problem is None,
        "problem": report.problem,
        **report.origin,
        "settings": dict(report.settings),
        "throughput": [cell_json(rate.cell) for rate in report.rates],
        "compute": {
            each.shape.name: {"device": each.device, "cells": [cell_json(cell) for cell in each.cells]}
            for each in report.computes
        },
        "scaling_error": {device: scaling_error(device) for device in PAPER_DEVICES},
        "share_below_2_5_gbytes_per_s": {
            device: share_below(grids, PAPER_RATE_BYTES_PER_S) for device, grids in _by_device(report).items()
        },
        "share_compute_bound": {
            device: _share_compute_bound(grids, report) for device, grids in _by_device(report).items()
        },
        "grids": {grid.key: _grid_json(grid, report) for grid in report.grids},
    }


def is_transfer_bound(cell: Requirement, report: OverlapReport) -> bool:
    """At this machine's throughput; False while that is not known."""
    return bool(report.rates) and cell.bound(rate_at(report.rates, cell.layer_bytes)) is Bound.TRANSFER


def _grid_lines(grid: Grid, report: OverlapReport) -> list[str]:
    hit_rates = list(dict.fromkeys(cell.hit_rate for cell in grid.cells))
    head = " " * 7 + "".join(f"{100 * hit_rate:g} %".rjust(CELL_WIDTH) for hit_rate in hit_rates)
    lines = ["", f"{grid.shape.title} on {grid.device} (fitted to {grid.fitted_to}{_errors(grid)})"]
    for title, scale in (("a layer's compute, ms", 1e3), ("B_req, GB/s", 1e-9)):
        lines += ["", head + f"   {title}"]
        for context in dict.fromkeys(cell.context_tokens for cell in grid.cells):
            words = []
            for cell in grid.cells:
                if cell.context_tokens == context:
                    value = cell.layer_compute_s if scale > 1 else cell.required_bytes_per_s
                    slow = TRANSFER_MARK if scale < 1 and is_transfer_bound(cell, report) else " "
                    words.append(f"{_plain(value * scale)}{cell.origin.mark}{slow}".rjust(CELL_WIDTH))
            lines.append(f"{context // KIB}K".rjust(7) + "".join(words))
    return lines


def _plain(value: float) -> str:
    if value >= 1000:
        return f"{value:.0f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _errors(grid: Grid) -> str:
    if not grid.fit.observations:
        return f", which on the model that can be compared is off by up to {100 * scaling_error(grid.device):.0f} %"
    return f", off by {100 * grid.fit.median_error:.1f} % in the median, {100 * grid.fit.greatest_error:.1f} % at most"


def _summary(report: OverlapReport) -> list[str]:
    lines = []
    for device, grids in _by_device(report).items():
        count = sum(len(grid.cells) for grid in grids)
        below = share_below(grids, PAPER_RATE_BYTES_PER_S)
        paper = " (paper: most)" if device == "A100" else ""
        line = f"{device}: {100 * below:.0f} % of {count} cells need at most 2.5 GB/s{paper}"
        share = _share_compute_bound(grids, report)
        here = "" if share is None else f"; {100 * share:.0f} % are compute-bound at what this machine moves"
        lines.append(line + here)
    return lines


def _share_compute_bound(grids: list[Grid], report: OverlapReport) -> float | None:
    if not report.rates:
        return None
    slow = [is_transfer_bound(cell, report) for grid in grids for cell in grid.cells]
    return slow.count(False) / len(slow)


def _by_device(report: OverlapReport) -> dict[str, list[Grid]]:
    devices = dict.fromkeys(grid.device for grid in report.grids)
    return {device: [grid for grid in report.grids if grid.device == device] for device in devices}


def _grid_json(grid: Grid, report: OverlapReport) -> dict[str, Any]:
    has_observations = bool(grid.fit.observations)
    return {
        "model": grid.shape.name,
        "source": grid.shape.source,
        "device": grid.device,
        "num_layers": grid.shape.num_layers,
        "token_layer_bytes": grid.shape.token_layer_bytes,
        "costs": asdict(grid.fit.costs),
        "fitted_to": grid.fitted_to,
        "fit_error_median": grid.fit.median_error if has_observations else None,
        "fit_error_greatest": grid.fit.greatest_error if has_observations else None,
        "cells": [_requirement_json(grid, cell, report) for cell in grid.cells],
    }


def _requirement_json(grid: Grid, cell: Requirement, report: OverlapReport) -> dict[str, Any]:
    values: dict[str, Any] = {
        **asdict(cell),
        "origin": cell.origin.value,
        "total_bytes": cell.layer_bytes * grid.shape.num_layers,
        "required_bytes_per_s": cell.required_bytes_per_s,
        "operations_per_s": grid.operations_per_s(cell),
    }
    if report.rates:
        rate = rate_at(report.rates, cell.layer_bytes)
        values |= {
            "host_bytes_per_s": rate,
            "bound": cell.bound(rate).value,
            "added_ttft_s": cell.added_ttft_s(rate, grid.shape.num_layers),
        }
    return values
