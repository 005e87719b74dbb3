"""Carrying out the overlap bench: the host's throughput, its compute where asked for, and the grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapters.nixl_agent import NixlFailure
from bench.child import BaselineError
from bench.compute.shapes import ModelShape
from bench.content import VerificationError
from bench.overlap.grids import measured_grid, paper_grids
from bench.overlap.requirements import Grid
from bench.overlap.throughput import LayerRate, ThroughputPlan, measure_throughput
from bench.server import BenchServerError
from descriptors.errors import ObjectCacheError

if TYPE_CHECKING:
    from bench.compute.measure import ComputePlan, MeasuredCompute


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """Everything one run found out. `origin` is commit and machine; `rates` are empty and `problem` says why where the
    throughput could not be had.
    """

    origin: Mapping[str, Any]
    settings: Mapping[str, Any]
    rates: tuple[LayerRate, ...]
    grids: tuple[Grid, ...]
    computes: tuple[MeasuredCompute, ...] = ()
    problem: str | None = None


def run_overlap(
    shapes: Sequence[ModelShape],
    throughput: ThroughputPlan,
    compute: ComputePlan | None,
    origin: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> OverlapReport:
    """The paper's grids always; this machine's beside them where there is a plan for its compute."""
    grids = paper_grids(shapes)
    computes: list[MeasuredCompute] = []
    rates: tuple[LayerRate, ...] = ()
    problem = None
    try:
        if compute is not None:
            computes = _measured(shapes, compute)
            grids += [measured_grid(each.shape, "host", each.fit) for each in computes]
        rates = measure_throughput(throughput)
    except VerificationError as error:
        problem = f"WRONG BYTES: {error}"
    except (BaselineError, BenchServerError, ObjectCacheError, NixlFailure, TimeoutError, OSError) as error:
        problem = str(error)
    return OverlapReport(origin, settings, rates, tuple(grids), tuple(computes), problem)


def _measured(shapes: Sequence[ModelShape], plan: ComputePlan) -> list[MeasuredCompute]:
    from bench.compute.measure import measure_compute

    try:
        return [measure_compute(shape, plan) for shape in shapes]
    except RuntimeError as error:
        raise BaselineError(f"torch: {error}") from error
