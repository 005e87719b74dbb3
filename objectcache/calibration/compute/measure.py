"""Measuring one layer of a model on this machine, over contexts and hit rates; and the result as text, JSON and chart.
Needs torch (the extra `torch`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from objectcache.calibration.charts import chart
from objectcache.calibration.compute.cost_model import Fit, Observation, Profile, fit_cost_model, prefill_s
from objectcache.calibration.compute.layer import DecoderLayer, Device, Dtype, describe_device
from objectcache.calibration.compute.shapes import ModelShape, small
from objectcache.calibration.samples import Cell, Task, run_rounds
from objectcache.calibration.text import aligned, origin_entries


class Point(NamedTuple):
    """One prefill to measure."""

    cached_tokens: int
    context_tokens: int


def _points(contexts: Sequence[int], missed: Sequence[int]) -> tuple[Point, ...]:
    return tuple(Point(context - count, context) for context in contexts for count in missed if count <= context)


CPU_POINTS = _points((1024, 4096, 16384), (64, 128, 512))
"""Few tokens that missed, some after a long prefix: a CPU takes seconds for a layer of thousands, and attention only
shows beside the products with weights where there is much to attend to.
"""
CUDA_POINTS = tuple(
    Point(round(context * hit_rate), context)
    for context in (4096, 16384, 32768, 65536)
    for hit_rate in (0.125, 0.5, 0.875)
)
SMOKE_POINTS = _points((64, 128), (8, 32, 64))


@dataclass(frozen=True, slots=True)
class ComputePlan:
    """The prefills to measure, and the device. `is_smoke` measures layers too small to say anything about speed."""

    device: Device
    dtype: Dtype
    points: tuple[Point, ...]
    runs: int
    seed: int
    is_smoke: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredCompute:
    """One model's: `cells` have the samples of one layer, `fit` the model of all layers fitted to their medians."""

    shape: ModelShape
    device: str
    cells: tuple[Cell, ...]
    fit: Fit

    @property
    def spread(self) -> float:
        """How far samples lie apart: (greatest - least) / median, the median over the points."""
        return statistics.median((max(each.samples_s) - min(each.samples_s)) / each.median_s() for each in self.cells)


def compute_plan(device: Device, dtype: Dtype, runs: int, seed: int) -> ComputePlan:
    """The points that such a device can do in a minute or so."""
    return ComputePlan(device, dtype, CUDA_POINTS if device is Device.CUDA else CPU_POINTS, runs, seed)


def smoke_plan(device: Device, dtype: Dtype, seed: int) -> ComputePlan:
    """Does it work, not how fast."""
    return ComputePlan(device, dtype, SMOKE_POINTS, runs=1, seed=seed, is_smoke=True)


def measure_compute(model: ModelShape, plan: ComputePlan) -> MeasuredCompute:
    """Every point in interleaved rounds, the first of which is not counted. Raises RuntimeError (torch's) where
    the layer does not fit.
    """
    context_max = max(point.context_tokens for point in plan.points)
    layer = DecoderLayer(small(model) if plan.is_smoke else model, plan.device, plan.dtype, context_max, plan.seed)
    tasks = [Task(point._asdict(), 0, partial(layer.prefill_s, *point)) for point in plan.points]
    cells = tuple(run_rounds(tasks, plan.runs, f"one layer of {model.name}"))
    observations = [
        Observation(*point, cell.median_s() * model.num_layers * 1e6)
        for point, cell in zip(plan.points, cells, strict=True)
    ]
    return MeasuredCompute(model, describe_device(plan.device), cells, fit_cost_model(observations))


def model_table(measured: MeasuredCompute, profile: Profile, origin: Mapping[str, Any]) -> str:
    """Each measured prefill beside the fitted one."""
    shape, fit = measured.shape, measured.fit
    lines = [f"{name}: {text}" for name, text in origin_entries(origin).items()]
    times = f"times its {shape.num_layers} layers"
    lines += [f"{shape.title}: one layer of random weights on {measured.device}, {times}", ""]
    rows = [
        [str(context), str(cached), f"{us / 1e3:.2f}", f"{us * (1 + error) / 1e3:.2f}", f"{error:+.1%}"]
        for (cached, context, us), error in zip(fit.observations, fit.errors(), strict=True)
    ]
    lines += aligned(["context", "cached", "measured, ms", "fitted, ms", "error"], rows)
    lines += [
        "",
        f"error: median {fit.median_error:.1%}, greatest {fit.greatest_error:.1%}; "
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
    with chart(path, f"{measured.shape.title} on {measured.device}", (6, 4)) as panels:
        axes = panels[0, 0]
        for context in sorted({each.context_tokens for each in measured.fit.observations}):
            here = sorted((each for each in measured.fit.observations if each.context_tokens == context), reverse=True)
            missed = [context - each.cached_tokens for each in here]
            (line,) = axes.plot(missed, [each.prefill_us / 1e3 for each in here], "o", label=f"context {context}")
            fitted = [prefill_s(measured.fit.costs, each.cached_tokens, context) * 1e3 for each in here]
            axes.plot(missed, fitted, "-", color=line.get_color(), linewidth=1)
        axes.set(xlabel="tokens that missed", ylabel="prefill of all layers, ms; lines: fitted")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend(fontsize=8)
