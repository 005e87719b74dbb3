"""Figure 13 on a device: a model, a prompt for each context, a server for each chunk size, and rounds. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.compute.shapes import ModelShape
from bench.content import VerificationError
from bench.device.accelerator import Accelerator
from bench.device.bed import DeviceBed, DeviceBedSettings, DeviceRun, filled_bed
from bench.device.model import Model
from bench.device.subject import Subject, make_model, make_subject
from bench.paper import context_tokens
from bench.progress import progress_bar
from bench.ttft.cases import Case, System
from bench.ttft.results import Cell

LOGITS_ERROR_MAX = 0.05
"""Of the last token's logits against those of the prompt computed whole, |difference| / |expected|. In bfloat16 a
product's rounding depends on how many tokens it is made for; with every cached value wrong the error is far greater.
"""


@dataclass(frozen=True, slots=True)
class DeviceTtftSettings:
    """What to measure. `link_bytes_per_s` None: what this host moves, not limited."""

    bed: DeviceBedSettings
    shape: ModelShape
    vocabulary: int
    systems: tuple[System, ...]
    contexts: tuple[str, ...]
    hit_rates: tuple[float, ...]
    chunk_tokens: tuple[int, ...]
    link_bytes_per_s: float | None
    runs: int
    seed: int


@dataclass(frozen=True, slots=True)
class Baseline:
    """One context without any loading: TTFTs of computing everything, and with the prefix's KV on the device already,
    by hit rate; `blind_error` is the logits' with wrong values for every cached token of the highest hit rate.
    """

    context: str
    recompute_s: tuple[float, ...]
    resident_s: dict[float, float]
    blind_error: float

    @property
    def shows_wrong_values(self) -> bool:
        """Whether the logits would tell: twice the limit."""
        return self.blind_error > 2 * LOGITS_ERROR_MAX


@dataclass
class DeviceTtft:
    """What was measured; `runs` are those of `cells`, in their order. `problem` says what wrong bytes came."""

    device: str
    baselines: list[Baseline] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    runs: list[tuple[DeviceRun, ...]] = field(default_factory=list)
    problem: str | None = None

    @property
    def logits_error_max(self) -> float | None:
        """Over all runs; None without one. NaN counts as the greatest."""
        errors = [run.logits_error for runs in self.runs for run in runs]
        return max(errors, key=lambda error: (error != error, error)) if errors else None

    @property
    def are_logits_right(self) -> bool:
        """Within the tolerance, where there was a run."""
        error = self.logits_error_max
        return error is None or error <= LOGITS_ERROR_MAX


@dataclass(frozen=True, slots=True)
class _Task:
    case: Case
    system: System
    runs: list[DeviceRun]


def measure_device_ttft(settings: DeviceTtftSettings, accelerator: Accelerator) -> DeviceTtft:
    """All of it; wrong bytes end it. Raises as `bench.device.bed.filled_bed`."""
    found = DeviceTtft(accelerator.title)
    longest = max(context_tokens(context) for context in settings.contexts)
    model = make_model(settings.shape, settings.vocabulary, accelerator, settings.seed, longest)
    try:
        for context in settings.contexts:
            _measure_context(settings, context, model, found)
    except VerificationError as error:
        found.problem = str(error)
    return found


def _measure_context(settings: DeviceTtftSettings, context: str, model: Model, found: DeviceTtft) -> None:
    token_count = context_tokens(context)
    cached = {hit_rate: round(token_count * hit_rate) for hit_rate in settings.hit_rates}
    subject = make_subject(model, token_count, max(cached.values()), settings.seed)
    resident_s = {hit_rate: subject.resident_s(count) for hit_rate, count in cached.items()}
    found.baselines.append(Baseline(context, subject.recompute_s, resident_s, subject.blind_error))
    for chunk_tokens in settings.chunk_tokens:
        cases = [Case(context, hit_rate, chunk_tokens, seconds) for hit_rate, seconds in resident_s.items()]
        _measure_chunks(settings, cases, subject, found)


def _measure_chunks(settings: DeviceTtftSettings, cases: Sequence[Case], subject: Subject, found: DeviceTtft) -> None:
    """Every system goes once uncounted over the longest prefix, which is the shortest to compute: the model itself is
    warm by now.
    """
    longest = max(cases, key=lambda case: case.chunk_count)
    title = f"{longest.context}, G={longest.chunk_tokens}"
    tasks = [_Task(case, system, []) for case in cases for system in settings.systems]
    with filled_bed(subject, longest, settings.bed) as bed:
        link = settings.link_bytes_per_s
        bed.link.set(None if link is None else settings.bed.scale.link_bytes_per_s(link))
        _rounds(bed, [_Task(longest, system, []) for system in settings.systems], 1, f"{title}: warming up")
        _rounds(bed, tasks, settings.runs, title)
    for task in tasks:
        found.cells.append(Cell(task.case, task.system, link, tuple(run.played for run in task.runs)))
        found.runs.append(tuple(task.runs))


def _rounds(bed: DeviceBed, tasks: Sequence[_Task], runs: int, title: str) -> None:
    """As in bench.ttft.run: in alternating sequence, so that none always finds what another left behind."""
    with progress_bar(runs * len(tasks), title) as advance:
        for round_index in range(runs):
            for task in tasks if round_index % 2 == 0 else tasks[::-1]:
                task.runs.append(bed.run(task.system, task.case))
                advance(1)
