"""What a model's measured layer came to: for people, as JSON, as a chart. Pure but for the chart's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.calibration.origin import origin_entries
from bench.compute.cost_model import prefill_s
from bench.compute.measure import MeasuredCompute
from bench.compute.profile import Profile


def model_table(measured: MeasuredCompute, profile: Profile, origin: Mapping[str, Any]) -> str:
    """Each measured prefill beside the fitted one."""
    shape = measured.shape
    lines = [f"{name}: {text}" for name, text in origin_entries(origin).items()]
    lines += [
        f"{shape.title}: one layer of random weights on {measured.device}, times its {shape.num_layers} layers",
        "",
        f"{'context':>9}{'cached':>9}{'measured, ms':>14}{'fitted, ms':>12}{'error':>8}",
    ]
    for each, error in zip(measured.fit.observations, measured.fit.errors(), strict=True):
        lines.append(
            f"{each.context_tokens:9}{each.cached_tokens:9}{each.prefill_us / 1e3:14.2f}"
            f"{each.prefill_us * (1 + error) / 1e3:12.2f}{error:+8.1%}"
        )
    lines += [
        "",
        f"error: median {measured.fit.median_error:.1%}, greatest {measured.fit.greatest_error:.1%}; "
        f"samples of a point lie {measured.spread:.1%} apart",
        f"a storage server that is told no compute times takes {profile['hit_rate']:.0%} of a context to be cached",
    ]
    return "\n".join(lines)


def model_json(
    measured: MeasuredCompute, profile: Profile, origin: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Plain values, raw samples included."""
    return {
        "bench": "calibrate",
        "what": "model",
        **origin,
        "settings": dict(settings),
        "device": measured.device,
        "profile": profile,
        "errors": measured.fit.errors(),
        "layer": [{**asdict(cell), "labels": dict(cell.labels)} for cell in measured.cells],
    }


def plot_model(measured: MeasuredCompute, path: Path) -> None:
    """Measured prefills over the tokens that missed, a line of the fit for each context. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for context in sorted({each.context_tokens for each in measured.fit.observations}):
        here = [each for each in measured.fit.observations if each.context_tokens == context]
        here.sort(key=lambda each: -each.cached_tokens)
        missed = [context - each.cached_tokens for each in here]
        (line,) = axes.plot(missed, [each.prefill_us / 1e3 for each in here], "o", label=f"context {context}")
        fitted = [prefill_s(measured.fit.costs, each.cached_tokens, context) * 1e3 for each in here]
        axes.plot(missed, fitted, "-", color=line.get_color(), linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens that missed")
    axes.set_ylabel("prefill of all layers, ms; lines: fitted")
    axes.set_title(f"{measured.shape.title} on {measured.device}", fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
