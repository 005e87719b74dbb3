"""How much later do requests that decode have their tokens while another request's prefix is loaded?

Seven requests decode in an engine. After some steps a prompt comes of which a prefix is stored, and waits for its load.
The times between the decoders' tokens are taken before, and from then on until the prompt has its first token. Its
suffix is computed in a step with the decoders, which takes longer than theirs alone wherever the prefix comes from: the
engine that has the prefix in its own blocks shows by how much. So the time that the steps took is divided by

    that of the steps in the engine that loads nothing + as many steps more as there were, each as long as before

of the same turn. Engines take turns, and compute with one thread each, so that a load has another core, as beside a
GPU. The prompt's tokens, and those of all decoders as far as both engines have them, are compared with those of the
engine that computes the whole prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

import numpy as np

from bench.beds.processes import BaselineError
from bench.core.lines import plain
from bench.core.rounds import Side, Target, interval
from bench.experiments.engine.bed import Bed, running_bed
from bench.experiments.engine.measure import WARM_UP_ROUND, insensitive, wrong
from bench.experiments.engine.ways import DECODERS, NOTES, Answer, Case, Command, EngineSettings, Way
from objectcache.calibration.samples import RoundTurns, progress_bar, spread

TURNS = 3
"""Prompts of a round, of which each has a suffix of its own behind the round's prefix."""
LATE_MAX = 1.02
TARGETS = (
    ("our tier, shared memory: steps beside a load over those without one", Way.TIER),
    ("the layerwise connector, loads ahead: the same", Way.AHEAD),
)
Session = Mapping[Way, Answer]
"""The answers of the engines in one turn."""


def measure_beside(settings: EngineSettings) -> dict[str, Any]:
    """The result, of which `problem` is the first wrong answer. Raises BaselineError, LocalServerError, OSError."""
    case = max(settings.cases, key=lambda each: (each.context_tokens, each.hit_rate))
    sessions: list[Session] = []
    problem: str | None = None
    with running_bed(settings) as bed:
        if bed.missing:
            raise BaselineError("; ".join(f"{way.title}: {why}" for way, why in bed.missing.items()))
        with progress_bar((1 + settings.runs) * TURNS * len(bed.engines), "engines") as advance:
            for index in range(WARM_UP_ROUND, settings.runs + 1):
                for way in bed.engines:
                    bed.store(way, index)
                for turn in range(TURNS):
                    session: dict[Way, Answer] = {}
                    for way in _in_turn(list(bed.engines), index * TURNS + turn):
                        session[way] = _asked(bed, way, case, index, turn)
                        advance(1)
                    problem = problem or next(problems(session, case, bed), None)
                    if index != WARM_UP_ROUND:
                        sessions.append(session)
                if problem is not None:
                    break
        ready = bed.ready
    by_suffix = [[each[Way.RECOMPUTE].tokens for each in sessions[turn::TURNS]] for turn in range(TURNS)]
    alike = next(filter(None, (insensitive({case: tokens}) for tokens in by_suffix)), None)
    return {
        "problem": problem or alike,
        "engines": ready,
        "notes": {way: NOTES[way] for way in settings.ways},
        "beside": judged(case, sessions),
    }


def _in_turn(ways: Sequence[Way], turn: int) -> list[Way]:
    others = [way for way in ways if way is not Way.RECOMPUTE]
    return [Way.RECOMPUTE, *RoundTurns.ROTATING.ordered(others, turn)]


def _asked(bed: Bed, way: Way, case: Case, index: int, turn: int) -> Answer:
    command = Command(index, case=case, suffix=turn, decoders=DECODERS)
    (answer,) = bed.ask_all({way.value: (bed.engines[way], command)})
    return answer


def problems(session: Session, case: Case, bed: Bed) -> Iterator[str]:
    """Reasons not to count a turn: other tokens than those of recomputing, or a prefix that did not come as it is to be
    measured.
    """
    reference = session[Way.RECOMPUTE]
    for way, answer in session.items():
        if found := wrong(way, case, answer, reference.tokens, bed.settings.grain_tokens(way)):
            yield found
        for number, (mine, theirs) in enumerate(zip_longest(answer.decoded, reference.decoded, fillvalue=())):
            count = min(len(mine), len(theirs))
            if not count or mine[:count] != theirs[:count]:
                yield f"{way.title}: decoder {number} has other tokens beside the load"


def late(answer: Answer, floor: Answer) -> float:
    """How much longer the decoders' steps took, from the prompt's arrival to its first token, than they take without a
    load: `floor` is the answer of the engine that has the prefix in its own blocks.
    """
    alone_s = statistics.median(answer.alone_s)
    more = len(answer.beside_s) - len(floor.beside_s)
    return sum(answer.beside_s) / (sum(floor.beside_s) + more * alone_s)


def judged(case: Case, sessions: Sequence[Session]) -> dict[str, Any]:
    """A row for each way, and the targets. Steps of all turns count together; `late` is one ratio for each turn."""
    rows: list[dict[str, Any]] = []
    ways = list(sessions[0]) if sessions else []
    found: dict[Way, list[float]] = {}
    for way in ways:
        mine = [session[way] for session in sessions]
        found[way] = [late(session[way], session[Way.OWN_BLOCKS]) for session in sessions]
        rows.append(
            {
                "way": way.value,
                "alone_s": steps_of([each for answer in mine for each in answer.alone_s]),
                "beside_s": steps_of([each for answer in mine for each in answer.beside_s]),
                "steps": asdict(spread([float(len(answer.beside_s)) for answer in mine])),
                "ttft_s": asdict(spread([answer.ttft_s for answer in mine])),
                "late": asdict(interval(found[way])),
                "samples": plain(mine),
            }
        )
    targets = [
        Target(what, LATE_MAX, spread(found[way]) if way in found else None, Side.AT_MOST, case.title, way.value)
        for what, way in TARGETS
    ]
    return {
        "case": case.title,
        "decoders": DECODERS,
        "turns": len(sessions),
        "rows": rows,
        "targets": [target.json("case", "ours") for target in targets],
    }


def steps_of(seconds: Sequence[float]) -> dict[str, Any]:
    """Times between tokens: their median with its interval, the 99th percentile, the longest, and their count."""
    return {
        "median": asdict(interval(seconds)),
        "p99": float(np.percentile(seconds, 99)),
        "max": max(seconds),
        "count": len(seconds),
    }
