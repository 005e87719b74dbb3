"""Measuring: in each round every way is given a base of its own to store, and then answers every case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.child import BaselineError
from bench.engine.bed import Bed, running_bed
from bench.engine.cases import Case
from bench.engine.results import Cell, insensitive, wrong
from bench.engine.settings import EngineSettings
from bench.engine.ways import OURS, Way, grain_tokens
from bench.engine.work import Answer, Ready
from bench.progress import progress_bar

WARM_UP_ROUND = 0
NEEDED = (Way.RECOMPUTE, *OURS)
Advance = Callable[[int], None]


@dataclass
class Engines:
    """What was measured. `problem` is the first wrong token, or load that did not happen; None when all was right."""

    cells: list[Cell] = field(default_factory=list)
    ready: dict[Way, Ready] = field(default_factory=dict)
    missing: dict[Way, str] = field(default_factory=dict)
    outputs: dict[Case, list[tuple[int, ...]]] = field(default_factory=dict)
    problem: str | None = None


class WrongAnswer(Exception):
    """A token or a load was not as it had to be."""


def measure_engines(settings: EngineSettings) -> Engines:
    """All of it; a wrong answer ends it. A peer that fails is named and left out. Raises BaselineError,
    BenchServerError, OSError.
    """
    found = Engines()
    answers: dict[tuple[Case, Way], list[Answer]] = {}
    with running_bed(settings) as bed:
        found.ready, found.missing = bed.ready, bed.missing
        _demand(bed)
        per_round = len(bed.engines) * (1 + len(settings.cases))
        with progress_bar(2 * len(bed.engines) + settings.runs * per_round, "engines") as advance:
            try:
                longest = max(settings.cases, key=lambda case: (case.context_tokens, case.hit_rate))
                _round(_Round(bed, found, WARM_UP_ROUND, [longest]), {}, advance)
                for index in range(1, settings.runs + 1):
                    _round(_Round(bed, found, index, list(settings.cases)), answers, advance)
                found.problem = insensitive(found.outputs)
            except WrongAnswer as error:
                found.problem = str(error)
    found.cells = [
        Cell(case, way, tuple(answers[case, way]))
        for case in settings.cases
        for way in settings.ways
        if (case, way) in answers and way not in found.missing
    ]
    return found


@dataclass(frozen=True, slots=True)
class _Round:
    bed: Bed
    found: Engines
    index: int
    cases: Sequence[Case]


def _round(this: _Round, answers: dict[tuple[Case, Way], list[Answer]], advance: Advance) -> None:
    """Recomputing comes first, since its tokens are what all are compared with; the rest takes turns in coming next."""
    for way in list(this.bed.engines):
        with _left_out_if_it_fails(this.bed, way):
            this.bed.store(way, this.index)
        advance(1)
    for case in this.cases:
        others = [way for way in this.bed.engines if way is not Way.RECOMPUTE]
        turn = this.index % max(1, len(others))
        wanted: tuple[int, ...] = ()
        for way in [Way.RECOMPUTE, *others[turn:], *others[:turn]]:
            with _left_out_if_it_fails(this.bed, way):
                answer = this.bed.measure(way, case, this.index)
                if way is Way.RECOMPUTE:
                    wanted = answer.tokens
                    this.found.outputs.setdefault(case, []).append(wanted)
                _check(this.bed, way, case, answer, wanted)
                answers.setdefault((case, way), []).append(answer)
            advance(1)
    this.bed.end_round()


def _check(bed: Bed, way: Way, case: Case, answer: Answer, wanted: Sequence[int]) -> None:
    problem = wrong(way, case, answer, wanted, grain_tokens(way, bed.settings.chunk_tokens))
    if problem is not None:
        raise WrongAnswer(problem)


@contextmanager
def _left_out_if_it_fails(bed: Bed, way: Way) -> Iterator[None]:
    try:
        yield
    except BaselineError as error:
        if way in NEEDED:
            raise
        bed.drop(way, str(error))


def _demand(bed: Bed) -> None:
    for way in (*NEEDED, Way.ADVISED):
        if way in bed.missing:
            raise BaselineError(f"{way.title}: {bed.missing[way]}")
