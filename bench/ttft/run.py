"""Measuring: a server for each context and chunk size, and in each round every system, hit rate and link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from bench.content import VerificationError
from bench.paper import MARGIN_BYTES_PER_S
from bench.progress import progress_bar
from bench.ttft.bed import Bed, BedSettings, filled_bed
from bench.ttft.cases import S3_SYSTEMS, Case, System, make_case
from bench.ttft.play import Played
from bench.ttft.results import Cell, Sweep, make_sweep


class FigureName(Enum):
    """The paper's numbers."""

    OVERHEAD = "13"
    CAPS = "14"
    RATES = "15"


@dataclass(frozen=True, slots=True)
class TtftSettings:
    """What to measure. Rates are unscaled; `link_bytes_per_s` None: not limited, and then there are no caps.
    `rate_factors` are rates of Figure 15 over a workload's r*.
    """

    bed: BedSettings
    figures: tuple[FigureName, ...]
    contexts: tuple[str, ...]
    hit_rates: tuple[float, ...]
    chunk_tokens: tuple[int, ...]
    link_bytes_per_s: float | None
    cap_bytes_per_s: float
    sweep_hit_rates: tuple[float, ...]
    sweep_chunk_tokens: int
    rate_factors: tuple[float, ...]
    runs: int
    sweep_runs: int

    def sweep_rates(self, case: Case) -> list[float]:
        """Ascending: those around r*, and the scheduler's own choice in the paper, r* and its margin."""
        wanted = {factor * case.zero_stall_bytes_per_s for factor in self.rate_factors}
        return sorted(wanted | {case.zero_stall_bytes_per_s + MARGIN_BYTES_PER_S})


@dataclass
class Ttft:
    """What was measured. `problem` says what wrong bytes came, None when all were right."""

    cells: list[Cell] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _Task:
    case: Case
    system: System
    link_bytes_per_s: float | None
    runs: list[Played]


def measure_ttft(settings: TtftSettings) -> Ttft:
    """All of it; wrong bytes end it. Raises BenchServerError, ObjectCacheError, NixlFailure, OSError, MemoryError."""
    found = Ttft()
    try:
        for context in settings.contexts:
            for chunk_tokens in settings.chunk_tokens:
                _measure_prefix(settings, context, chunk_tokens, found)
    except VerificationError as error:
        found.problem = str(error)
    return found


def measure_sweep(bed: Bed, case: Case, rates: Sequence[float], runs: int) -> list[Cell]:
    """S3Agg-LW at each of the unscaled rates, interleaved; every run counts. Raises as `measure_ttft`."""
    tasks = [_Task(case, System.S3_AGG_LW, rate, []) for rate in rates]
    _rounds(bed, tasks, runs, f"{case.context}, {case.hit} %: rates")
    return _cells(tasks)


def _measure_prefix(settings: TtftSettings, context: str, chunk_tokens: int, found: Ttft) -> None:
    """Every workload of one context and chunk size: their prefixes are beginnings of the longest one's."""
    tasks = _tasks(settings, context, chunk_tokens)
    is_swept = FigureName.RATES in settings.figures and chunk_tokens == settings.sweep_chunk_tokens
    swept = [make_case(context, hit_rate, chunk_tokens) for hit_rate in settings.sweep_hit_rates if is_swept]
    cases = [task.case for task in tasks] + swept
    if not cases:
        return
    longest = max(cases, key=lambda case: case.chunk_count)
    with filled_bed(longest, settings.bed) as bed:
        if tasks:
            _rounds(bed, _tasks(settings, context, chunk_tokens), 1, f"{context}, G={chunk_tokens}: warming up")
            _rounds(bed, tasks, settings.runs, f"{context}, G={chunk_tokens}")
            found.cells += _cells(tasks)
        for case in swept:
            cells = measure_sweep(bed, case, settings.sweep_rates(case), settings.sweep_runs)
            found.sweeps.append(make_sweep(cells, settings.bed.scale))


def _tasks(settings: TtftSettings, context: str, chunk_tokens: int) -> list[_Task]:
    """Figure 13's, and then, at the capped link, Figure 14's. The latter needs the S3 systems' times of the former."""
    has_overhead = FigureName.OVERHEAD in settings.figures
    has_caps = FigureName.CAPS in settings.figures and settings.link_bytes_per_s is not None
    cases = [make_case(context, hit_rate, chunk_tokens) for hit_rate in settings.hit_rates]
    systems = tuple(System) if has_overhead else S3_SYSTEMS if has_caps else ()
    tasks = [_Task(case, system, settings.link_bytes_per_s, []) for case in cases for system in systems]
    if has_caps:
        tasks += [_Task(case, system, settings.cap_bytes_per_s, []) for case in cases for system in S3_SYSTEMS]
    return tasks


def _rounds(bed: Bed, tasks: Sequence[_Task], runs: int, title: str) -> None:
    """Each round does everything once, in alternating sequence, so that none always finds what another left behind."""
    with progress_bar(runs * len(tasks), title) as advance:
        for round_index in range(runs):
            for task in tasks if round_index % 2 == 0 else tasks[::-1]:
                _set_link(bed, task.link_bytes_per_s)
                task.runs.append(bed.run(task.system, task.case))
                advance(1)


def _set_link(bed: Bed, unscaled_bytes_per_s: float | None) -> None:
    bed.link.set(None if unscaled_bytes_per_s is None else bed.settings.scale.link_bytes_per_s(unscaled_bytes_per_s))


def _cells(tasks: Sequence[_Task]) -> list[Cell]:
    return [Cell(task.case, task.system, task.link_bytes_per_s, tuple(task.runs)) for task in tasks]
