"""What coarse chunks cost, for people, as JSON and as a chart. The chart needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.compute.shapes import ModelShape
from bench.device.recompute import Boundary, Recompute, RecomputeSettings, boundary_tokens
from bench.paper import context_tokens
from bench.samples import spread

PAPER_GPUS = ("A100", "H100")
REQUESTS_PER_S = 1000
"""Of Table A6's caption."""
DPI = 120


def recompute_table(settings: RecomputeSettings, found: Recompute) -> str:
    """A line for each boundary, and Table A6 from them."""
    coarsest = max(settings.chunk_tokens)
    lines = [f"device: {found.device}", *(f"* {note}" for note in _notes(settings))]
    for shape, context, boundaries in _groups(settings, found):
        lines += ["", f"{shape.title}, {context}: TTFT in ms, medians; added: G={coarsest} over the finest"]
        lines.append("  hit %" + "".join(f"{f'G={grain}':>10}" for grain in settings.chunk_tokens) + _ADDED_HEAD)
        lines += [_boundary_line(boundary, settings.chunk_tokens) for boundary in boundaries]
        lines.append(_summary_line(shape, context, boundaries, settings))
    lines += ["", "logits verified" if found.problem is None else f"WRONG LOGITS: {found.problem}"]
    return "\n".join(lines)


def recompute_json(settings: RecomputeSettings, found: Recompute, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values, raw samples included."""
    return {
        "bench": "recompute",
        "device": found.device,
        "verified": found.problem is None,
        "problem": found.problem,
        **origin,
        "settings": asdict(settings),
        "notes": _notes(settings),
        "boundaries": [_boundary_json(boundary, settings.chunk_tokens) for boundary in found.boundaries],
        "table_a6": [
            {"model": shape.name, "context": context, **_summary(shape, context, boundaries, settings)}
            for shape, context, boundaries in _groups(settings, found)
        ],
    }


def plot_recompute(settings: RecomputeSettings, found: Recompute, path: Path) -> None:
    """A panel for each model and context: what each size of chunks adds at each boundary, and the paper's points."""
    from matplotlib.figure import Figure

    groups = _groups(settings, found)
    figure = Figure(figsize=(1 + 4.5 * max(1, len(groups)), 4), layout="constrained")
    panels = figure.subplots(1, max(1, len(groups)), squeeze=False)[0]
    for (shape, context, boundaries), axes in zip(groups, panels, strict=False):
        hits = [100 * each.hit_rate for each in boundaries]
        for grain in settings.chunk_tokens[1:]:
            added = [each.added_s(grain) for each in boundaries]
            errors = [
                [1e3 * (each.median - each.min) for each in added],
                [1e3 * (each.max - each.median) for each in added],
            ]
            axes.errorbar(
                hits, [1e3 * each.median for each in added], errors, capsize=2, marker="o", label=f"G={grain}"
            )
        for gpu in PAPER_GPUS:
            known = [(100 * each.hit_rate, each.paper_added_s(gpu)) for each in boundaries]
            points = [(hit, 1e3 * value) for hit, value in known if value is not None]
            if points:
                axes.plot(*zip(*points, strict=True), linestyle=":", marker="x", label=f"paper, G=512, {gpu}")
        axes.set_title(f"{shape.title}, {context}")
        axes.set_xlabel("hit boundary, %")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    panels[0].set_ylabel(f"TTFT added over G={settings.chunk_tokens[0]}, ms")
    figure.suptitle(f"What coarse chunks cost on {found.device}")
    figure.savefig(path, dpi=DPI)


_ADDED_HEAD = f"{'added':>10}{'(least to greatest)':>22}" + "".join(f"{f'paper {gpu}':>13}" for gpu in PAPER_GPUS)


def _notes(settings: RecomputeSettings) -> list[str]:
    return [
        "of a prompt whose first M tokens would hit, M - G are reused and their KV is on the device; random weights",
        f"the paper's columns are G=512 over G=16 of its Tables A1 and A2; {settings.runs} counted rounds",
        f"GPU hours: of {REQUESTS_PER_S} requests/s for a day, as in the caption of Table A6",
    ]


def _groups(settings: RecomputeSettings, found: Recompute) -> list[tuple[ModelShape, str, list[Boundary]]]:
    groups = []
    for shape in settings.shapes:
        for context in settings.contexts:
            here = [each for each in found.boundaries if (each.model, each.context) == (shape.name, context)]
            if here:
                groups.append((shape, context, here))
    return groups


def _summary(
    shape: ModelShape, context: str, boundaries: Sequence[Boundary], settings: RecomputeSettings
) -> dict[str, float]:
    """Table A6: mean and standard deviation over the boundaries, and operations, the same at all of them but for
    attention.
    """
    finest, coarsest = min(settings.chunk_tokens), max(settings.chunk_tokens)
    added_s = [boundary.added_s(coarsest).median for boundary in boundaries]
    tokens = context_tokens(context)
    operations = [
        shape.prefill_operations(boundary_tokens(context, each.hit_rate) - coarsest, tokens)
        - shape.prefill_operations(boundary_tokens(context, each.hit_rate) - finest, tokens)
        for each in boundaries
    ]
    return {
        "added_mean_s": statistics.mean(added_s),
        "added_stdev_s": statistics.stdev(added_s) if len(added_s) > 1 else 0.0,
        "added_operations": statistics.mean(operations),
        "gpu_hours_per_day": statistics.mean(added_s) * REQUESTS_PER_S * 24,
    }


def _summary_line(shape: ModelShape, context: str, boundaries: Sequence[Boundary], settings: RecomputeSettings) -> str:
    found = _summary(shape, context, boundaries, settings)
    said = (
        f"Table A6: {found['added_mean_s'] * 1e3:.1f} ± {found['added_stdev_s'] * 1e3:.1f} ms, "
        f"{found['added_operations'] / 1e12:.1f} T operations, {found['gpu_hours_per_day']:.0f} GPU hours a day"
    )
    for gpu in PAPER_GPUS:
        known = [value for each in boundaries if (value := each.paper_added_s(gpu)) is not None]
        if len(known) > 1:
            said += f"; paper's {gpu} {statistics.mean(known) * 1e3:.1f} ± {statistics.stdev(known) * 1e3:.1f} ms"
    return said


def _boundary_line(boundary: Boundary, chunk_tokens: Sequence[int]) -> str:
    words = [f"{statistics.median(boundary.ttft_s[grain]) * 1e3:10.1f}" for grain in chunk_tokens]
    added = boundary.added_s(max(chunk_tokens))
    extremes = f"({added.min * 1e3:.1f} to {added.max * 1e3:.1f})"
    papers = [boundary.paper_added_s(gpu) for gpu in PAPER_GPUS]
    known = "".join(f"{'-' if value is None else f'{value * 1e3:.1f}':>13}" for value in papers)
    return f"{100 * boundary.hit_rate:7g}{''.join(words)}{added.median * 1e3:10.1f}{extremes:>22}{known}"


def _boundary_json(boundary: Boundary, chunk_tokens: Sequence[int]) -> dict[str, Any]:
    return {
        "model": boundary.model,
        "context": boundary.context,
        "hit_rate": boundary.hit_rate,
        "boundary_tokens": boundary_tokens(boundary.context, boundary.hit_rate),
        "by_chunk_tokens": {
            str(grain): {
                "reused_tokens": boundary_tokens(boundary.context, boundary.hit_rate) - grain,
                "ttft_s": asdict(spread(boundary.ttft_s[grain])),
                "added_s": asdict(boundary.added_s(grain)),
                "sample_count": len(boundary.ttft_s[grain]),
                "samples_s": list(boundary.ttft_s[grain]),
            }
            for grain in chunk_tokens
        },
        "paper_added_s": {gpu: boundary.paper_added_s(gpu) for gpu in PAPER_GPUS},
    }
