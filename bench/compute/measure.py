"""Measuring one layer of a model on this machine, over contexts and hit rates. Needs torch (the extra `torch`)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.compute.cost_model import Fit, Observation, fit_cost_model
from bench.compute.layer import DecoderLayer, Device, Dtype, describe_device
from bench.compute.profile import ASSUMED_HIT_RATE, Profile, compute_profile
from bench.compute.shapes import ModelShape, shape, small
from bench.ladder.results import Cell
from bench.ladder.rounds import Task, run_rounds


@dataclass(frozen=True, slots=True)
class Point:
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
    """What is measured where. `is_smoke` measures layers too small to say anything about speed."""

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
    tasks = [_task(layer, point) for point in plan.points]
    cells = tuple(run_rounds(tasks, plan.runs, f"one layer of {model.name}"))
    observations = [
        Observation(point.cached_tokens, point.context_tokens, cell.median_s() * model.num_layers * 1e6)
        for point, cell in zip(plan.points, cells, strict=True)
    ]
    return MeasuredCompute(model, describe_device(plan.device), cells, fit_cost_model(observations))


def measure_profile(name: str, plan: ComputePlan, hit_rate: float = ASSUMED_HIT_RATE) -> Profile:
    """The table `[[compute_profiles]]` of a model, measured here. Raises KeyError for a model that is not in SHAPES."""
    measured = measure_compute(shape(name), plan)
    return compute_profile(measured.shape, measured.fit, hit_rate)


def _task(layer: DecoderLayer, point: Point) -> Task:
    labels = {"cached_tokens": point.cached_tokens, "context_tokens": point.context_tokens}
    return Task(labels, 0, lambda: layer.prefill_s(point.cached_tokens, point.context_tokens))
