"""Measuring: in each round every way is given a base of its own to store, and then answers every case. A wrong answer
ends it. Figures are medians of ratios within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from bench.beds.processes import BaselineError
from bench.core.lines import plain
from bench.core.rounds import Side, Target, paired
from bench.core.show import Json
from bench.experiments.engine.bed import Bed, running_bed
from bench.experiments.engine.ways import (
    COMPUTING,
    LOADING_ALL,
    NOTES,
    OURS,
    Answer,
    Case,
    EngineSettings,
    Way,
    by_case,
)
from nixl_client.transports.transport import Transport
from objectcache.calibration.content import VerificationError
from objectcache.calibration.samples import RoundTurns, Spread, progress_bar, spread

WARM_UP_ROUND = 0

TARGET_HIT_RATE = 0.875
TARGETS = (
    ("recompute over ObjectCache", Way.RECOMPUTE, 4.0),
    ("ExampleConnector over ObjectCache", Way.EXAMPLE, 1.0),
    ("ExampleConnector, told the prefixes, over ObjectCache", Way.EXAMPLE_TOLD, 1.0),
    ("LMCache with S3 over ObjectCache", Way.LMCACHE_S3, 1.0),
)
"""The issue's three, that of the ExampleConnector both as it comes and for what it can do when told more."""
TIER_TARGETS = (
    ("vLLM's fs tier over our tier, shared memory", Way.FS_TIER, 1 / 0.8, Way.TIER),
    ("vLLM's obj tier over our tier, http", Way.OBJ_TIER, 1 / 0.6, Way.TIER_HTTP),
)
LOOKUP_KEYS, LOOKUPS, LOOKUP_S_MAX = 1_000, 21, 0.01
Answers = Mapping[tuple[Case, Way], Sequence[Answer]]
"""One for each round."""


def measure_engines(settings: EngineSettings) -> dict[str, Any]:
    """The result, of which `problem` is the first wrong answer. A peer that fails is named and left out. Raises
    BaselineError, LocalServerError, OSError.
    """
    answers: dict[tuple[Case, Way], list[Answer]] = {}
    outputs: dict[Case, list[tuple[int, ...]]] = {}
    with running_bed(settings) as bed:
        for way in (*needed(settings), Way.ADVISED):
            if way in bed.missing:
                raise BaselineError(f"{way.title}: {bed.missing[way]}")
        longest = max(settings.cases, key=lambda case: (case.context_tokens, case.hit_rate))
        per_round = len(bed.engines) * (1 + len(settings.cases))
        with progress_bar(2 * len(bed.engines) + settings.runs * per_round, "engines") as advance:
            try:
                for index in range(WARM_UP_ROUND, settings.runs + 1):
                    cases = [longest] if index == WARM_UP_ROUND else settings.cases
                    for case, way, answer in _round(bed, index, cases, advance):
                        if way is Way.RECOMPUTE:
                            outputs.setdefault(case, []).append(answer.tokens)
                        if index != WARM_UP_ROUND:
                            answers.setdefault((case, way), []).append(answer)
                problem = insensitive(outputs)
            except VerificationError as error:
                problem = str(error)
        lookups = {"lookups": looked_up(bed)} if settings.tier else {}
    return {"problem": problem, **figures(bed, answers, outputs), **lookups}


def needed(settings: EngineSettings) -> tuple[Way, ...]:
    """Ways that the others are compared with."""
    return (Way.RECOMPUTE, Way.TIER) if settings.tier else (Way.RECOMPUTE, *OURS)


def looked_up(bed: Bed) -> dict[str, Any]:
    """How long one question for LOOKUP_KEYS chunks takes, of which every second one is stored. Raises
    VerificationError for a wrong answer.
    """
    keys = [f"vllm/looked-up/0/{index:064x}" for index in range(LOOKUP_KEYS)]
    seconds = []
    with bed.server.client(Transport.HTTP) as client:
        client.put_chunks(keys[::2], [b"stored"] * len(keys[::2]))
        for _ in range(LOOKUPS):
            began_s = time.perf_counter()
            found = client.present(keys)
            seconds.append(time.perf_counter() - began_s)
            if list(found) != [index % 2 == 0 for index in range(LOOKUP_KEYS)]:
                raise VerificationError("a lookup tells of other chunks than are stored")
    found_s = spread(seconds)
    return {
        "keys": LOOKUP_KEYS,
        "seconds": asdict(found_s),
        "limit_s": LOOKUP_S_MAX,
        "is_met": found_s.median < LOOKUP_S_MAX,
    }


def figures(bed: Bed, answers: Answers, outputs: Mapping[Case, Sequence[Sequence[int]]]) -> dict[str, Any]:
    """Everything of the ways side by side, raw samples included; `outputs` are the recomputed tokens of each round."""
    settings, missing = bed.settings, bed.missing
    in_order = [(case, way) for case in settings.cases for way in settings.ways if way not in missing]
    measured = rows({key: answers[key] for key in in_order if key in answers}, settings.shape.token_bytes)
    return {
        "engines": bed.ready,
        "notes": {way: NOTES[way] for way in settings.ways},
        "not_run": {way: f"not run: {reason}" for way, reason in missing.items()},
        "measurements": measured,
        "targets": tier_targets(measured, missing) if settings.tier else targets(measured, missing),
        "distinct_outputs": {case.title: len(set(tokens)) for case, tokens in outputs.items()},
    }


def _round(
    bed: Bed, index: int, cases: Sequence[Case], advance: Callable[[int], None]
) -> Iterator[tuple[Case, Way, Answer]]:
    """Recomputing comes first, since its tokens are what all are compared with; the rest takes turns in coming next.
    Raises VerificationError.
    """
    for way in list(bed.engines):
        with _left_out_if_it_fails(bed, way):
            bed.store(way, index)
        advance(1)
    for case in cases:
        others = [way for way in bed.engines if way is not Way.RECOMPUTE]
        wanted: tuple[int, ...] | None = None
        for way in [Way.RECOMPUTE, *RoundTurns.ROTATING.ordered(others, index)]:
            with _left_out_if_it_fails(bed, way):
                answer = bed.measure(way, case, index)
                wanted = answer.tokens if wanted is None else wanted
                problem = wrong(way, case, answer, wanted, bed.settings.grain_tokens(way))
                if problem is not None:
                    raise VerificationError(problem)
                yield case, way, answer
            advance(1)
    bed.end_round()


@contextmanager
def _left_out_if_it_fails(bed: Bed, way: Way) -> Iterator[None]:
    try:
        yield
    except BaselineError as error:
        if way in needed(bed.settings):
            raise
        bed.drop(way, str(error))


def wrong(way: Way, case: Case, answer: Answer, wanted: Sequence[int], grain_tokens: int) -> str | None:
    """What is wrong with an answer: other tokens than recomputing gives, or not the load that it is to measure."""
    if list(answer.tokens) != list(wanted):
        return f"{way.title}, {case.title}: tokens {list(answer.tokens)}, recomputed {list(wanted)}"
    stored = 0 if way in COMPUTING else case.prefix_tokens // grain_tokens * grain_tokens
    if way is Way.ADVISED:  # how much it loads is its own choice
        stored = min(stored, answer.cached_tokens)
    if answer.cached_tokens != stored:
        return f"{way.title}, {case.title}: {answer.cached_tokens} tokens were not computed, {stored} expected"
    loaded, failures = answer.counters.get("loaded_tokens", 0), answer.counters.get("load_failures", 0)
    if way in LOADING_ALL and (loaded != stored or failures):
        return f"{way.title}, {case.title}: {loaded:.0f} of {stored} tokens loaded, {failures:.0f} failures"
    return None


def insensitive(outputs: Mapping[Case, Sequence[Sequence[int]]]) -> str | None:
    """The first case whose rounds, of the same suffix after other prefixes, all end in the same tokens: there wrong KV
    would go unnoticed.
    """
    alike = (case.title for case, tokens in outputs.items() if len(tokens) > 1 and len(set(map(tuple, tokens))) == 1)
    found = next(alike, None)
    return found and f"{found}: the same tokens after every prefix: a comparison of tokens shows nothing"


def rows(answers: Answers, token_bytes: int) -> list[dict[str, Any]]:
    """One for each case and way, raw samples included."""
    made: list[dict[str, Any]] = [
        {
            "context_tokens": case.context_tokens,
            "hit_rate": case.hit_rate,
            "way": way.value,
            "ttft_s": asdict(spread([each.ttft_s for each in mine])),
            "idle_cpu_share_max": max(each.idle_cpu_share for each in mine),
            "samples": plain(mine),
        }
        for (case, way), mine in answers.items()
    ]
    for ways in by_case(made):
        baseline, floor = ways.get(Way.RECOMPUTE.value), ways.get(Way.OWN_BLOCKS.value)
        for name, row in ways.items():
            is_loading = Way(name) not in (*COMPUTING, Way.OWN_BLOCKS)
            row["recompute_over_it"] = baseline and ratio(baseline, row)
            row["over_own_blocks"] = loading(row, floor, token_bytes) if floor and is_loading else None
    return made


def ttfts_s(row: Json) -> list[float]:
    """The times to the first token, one for each round."""
    return [sample["ttft_s"] for sample in row["samples"]]


def ratio(over: Json, under: Json) -> dict[str, float]:
    """TTFT over TTFT, round by round. Raises ValueError where the rows have not the same rounds."""
    return asdict(spread(paired(ttfts_s(over), ttfts_s(under))))


def best_of(ways: Mapping[str, Json], of: Sequence[Way] = OURS) -> Json | None:
    """The row with the lowest median TTFT; None where none was measured."""
    found = [ways[way.value] for way in of if way.value in ways]
    return min(found, key=lambda row: row["ttft_s"]["median"], default=None)


def loading(row: Json, own_blocks: Json, token_bytes: int) -> dict[str, Any]:
    """What a way adds to the same request with its prefix in the engine's own blocks: seconds by round, and the bytes
    over their median; None for the rate where nothing was added. Raises ValueError where rounds differ in number.
    """
    added_s = spread([one - other for one, other in zip(ttfts_s(row), ttfts_s(own_blocks), strict=True)])
    nbytes = row["samples"][0]["cached_tokens"] * token_bytes
    rate = nbytes / added_s.median if added_s.median > 0 else None
    return {"added_s": asdict(added_s), "nbytes": nbytes, "rate_bytes_per_s": rate}


def tier_targets(measured: Sequence[Json], missing: Mapping[Way, str]) -> list[dict[str, Any]]:
    """Each in the case where it is worst: theirs over ours."""
    made = []
    for what, way, limit, own in TIER_TARGETS:
        reason = missing.get(way, missing.get(own, "nothing to compare it with"))
        target = Target(what, limit, None, Side.AT_LEAST, reason=reason)
        for ways in by_case(measured):
            theirs, ours = ways.get(way.value), ways.get(own.value)
            if theirs is None or ours is None:
                continue
            value = spread(paired(ttfts_s(theirs), ttfts_s(ours)))
            if not isinstance(target.value, Spread) or value.median < target.value.median:
                title = Case(ours["context_tokens"], ours["hit_rate"]).title
                target = Target(what, limit, value, Side.AT_LEAST, title, ours["way"])
        made.append(target.json("case", "ours", "reason"))
    return made


def targets(measured: Sequence[Json], missing: Mapping[Way, str]) -> list[dict[str, Any]]:
    """Each in the case where it is worst: theirs over the best of ours. For recomputing the limit itself is enough;
    peers must be slower.
    """
    cases = by_case([row for row in measured if row["hit_rate"] == TARGET_HIT_RATE])
    made = []
    for what, way, limit in TARGETS:
        side = Side.AT_LEAST if way is Way.RECOMPUTE else Side.MORE_THAN
        reason = missing.get(way, "nothing to compare it with")
        target = Target(what, limit, None, side, reason=reason)
        for ways in cases:
            theirs, ours = ways.get(way.value), best_of(ways)
            if theirs is None or ours is None:
                continue
            value = spread(paired(ttfts_s(theirs), ttfts_s(ours)))
            if not isinstance(target.value, Spread) or value.median < target.value.median:
                title = Case(ours["context_tokens"], ours["hit_rate"]).title
                target = Target(what, limit, value, side, title, ours["way"])
        made.append(target.json("case", "ours", "reason"))
    return made
