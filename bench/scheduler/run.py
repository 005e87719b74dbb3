"""Carrying out the chosen parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from bench.scheduler.cost import DecisionCost, measure_costs
from bench.scheduler.live import Live, LiveSettings, measure_live
from bench.scheduler.random_workloads import RandomOutcome, measure_random
from bench.scheduler.results import Cell, simulate_paper
from bench.scheduler.scale import Served, serve_scale, serve_trace
from bench.scheduler.trace import EXCERPT, read_trace, trace_requests


class Part(Enum):
    """By their names on the command line."""

    SIMULATION = "simulation"
    RANDOM = "random"
    LIVE = "live"
    COST = "cost"
    TRACE = "trace"
    SCALE = "scale"


@dataclass(frozen=True, slots=True)
class ScaleSettings:
    """Tenants that all come at once, and requests of theirs that come at random, over one link."""

    tenant_count: int
    request_count: int
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Arrivals from a file; the link is such that their bytes need `load` of it on the average."""

    file: Path = EXCERPT
    count_max: int | None = None
    load: float = 0.3
    gpu_count: int | None = None
    payload_bytes_max: int | None = None


@dataclass(frozen=True, slots=True)
class SchedulerBenchSettings:
    """What to measure. `payload_bytes_max` is the simulated server's."""

    parts: tuple[Part, ...]
    live: LiveSettings
    trace: TraceSettings
    scale: ScaleSettings
    payload_bytes_max: int
    random_count: int
    processes: int
    cost_counts: tuple[int, ...]
    cost_payloads: int
    cost_runs: int
    seed: int


@dataclass
class SchedulerReport:
    """What was found; what was not asked for is empty. `entry_count` is of the whole trace."""

    settings: SchedulerBenchSettings
    simulated: list[Cell] = field(default_factory=list)
    random: list[RandomOutcome] = field(default_factory=list)
    live: Live | None = None
    costs: list[DecisionCost] = field(default_factory=list)
    trace: list[Served] = field(default_factory=list)
    entry_count: int = 0
    scale: list[Served] = field(default_factory=list)

    @property
    def problem(self) -> str | None:
        """Wrong bytes of the live run; None when all were right."""
        return None if self.live is None else self.live.problem


def run_parts(settings: SchedulerBenchSettings, show: Callable[[Part, SchedulerReport], None]) -> SchedulerReport:
    """One after the other; each is shown when it is there. Raises what the live run raises, and TraceError."""
    report = SchedulerReport(settings)
    for part in settings.parts:
        _run(part, settings, report)
        show(part, report)
    return report


def _run(part: Part, settings: SchedulerBenchSettings, report: SchedulerReport) -> None:
    match part:
        case Part.SIMULATION:
            report.simulated = simulate_paper(settings.live.workloads, settings.payload_bytes_max)
        case Part.RANDOM:
            report.random = measure_random(settings.random_count, settings.seed, settings.processes)
        case Part.LIVE:
            report.live = measure_live(settings.live)
        case Part.COST:
            report.costs = measure_costs(
                settings.cost_counts, settings.cost_payloads, settings.cost_runs, settings.seed
            )
        case Part.TRACE:
            trace = settings.trace
            entries = read_trace(trace.file, trace.count_max)
            report.entry_count = len(entries)
            report.trace = serve_trace(trace_requests(entries), trace.load, trace.gpu_count, trace.payload_bytes_max)
        case Part.SCALE:
            scale = settings.scale
            report.scale = serve_scale(scale.tenant_count, scale.request_count, scale.link_bytes_per_s, settings.seed)
