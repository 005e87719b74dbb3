"""Two questions over links that the server paces.

Is `load: advised` as good as the better of loading all and computing all? The break-even is what the case's prefix may
be loaded at in the time that computing it takes: measured first, on a link that nobody paces. Then each link has a
server of its own that paces to a factor of it, and three engines take turns.

Does it help the scheduler that engines state their compute times, and what does a lie of one do to the others? Engines
share one link, and ask at the same moment, each with a prompt of another length or share that is stored. They do this
under each condition in turn, within a round. An engine beside them stores the rounds' prefixes, and one without a store
computes the tokens that all answers are compared with; both are idle meanwhile. Added TTFT is that over the same
engine's in the same round over a link without a limit. Ratios are of one round.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from bench.beds.processes import BaselineError, Child
from bench.core.show import Json
from bench.experiments.engine.bed import Bed, running_bed
from bench.experiments.engine.measure import WARM_UP_ROUND, best_of, measure_engines, ratio, ttfts_s, wrong
from bench.experiments.engine.ways import Answer, Case, Command, EngineSettings, Way, by_case
from bench.paper.scheduler.live import Rules, go_by
from bench.paper.scheduler.simulation import EQUAL_WORK_CONSERVING, SLACK
from nixl_client.client import Transport
from objectcache.calibration.samples import RoundTurns, progress_bar, spread
from objectcache.calibration.servers import ConfiguredServer

FACTORS = (4.0, 1.0, 0.25)
"""Well above the break-even, near it, and well below."""
LIMIT = 1.1
"""TTFT of advised over the better of the two, at most."""


def measure_advised(settings: EngineSettings, factors: Sequence[float] = FACTORS) -> dict[str, Any]:
    """Measure the longest context with the highest hit rate. `problem` is the first wrong token, or why an engine
    did not run. Raises BaselineError, LocalServerError, OSError.
    """
    case = max(settings.cases, key=lambda each: (each.hit_rate, each.context_tokens))
    one = replace(settings, contexts=(case.context_tokens,), hit_rates=(case.hit_rate,))
    break_even = _break_even(one, case)
    links, problems = [], []
    for factor in factors:
        rate = factor * break_even
        table = f"[scheduler]\nlink_bytes_per_s = {rate}\nmargin_bytes_per_s = 0.0\n"
        with _configured(one, (Way.RECOMPUTE, Way.LAYERWISE, Way.ADVISED), table) as (paced, _):
            found = measure_engines(paced)
        links.append(link_row(factor, rate, found["measurements"]))
        problems += [found["problem"], *(f"{way.title}: {why}" for way, why in found["not_run"].items())]
    return {
        "case": case.title,
        "break_even_bytes_per_s": break_even,
        "limit": LIMIT,
        "is_met": is_met(links),
        "problem": next(filter(None, problems), None),
        "links": links,
    }


@contextmanager
def _configured(settings: EngineSettings, ways: tuple[Way, ...], text: str) -> Iterator[tuple[EngineSettings, Path]]:
    """Settings of these ways and of a server with that configuration, and the file of it."""
    with tempfile.TemporaryDirectory(prefix="objectcache-link-", dir=settings.folder) as folder:
        config = Path(folder) / "link.toml"
        config.write_text(text)
        yield replace(settings, ways=ways, serve_options=(*settings.serve_options, "--config", str(config))), config


def _break_even(settings: EngineSettings, case: Case) -> float:
    """Bytes/s. Raises BaselineError where computing the prefix takes no time that could be measured."""
    found = measure_engines(replace(settings, ways=(Way.RECOMPUTE, Way.OWN_BLOCKS)))
    if len(found["measurements"]) < 2:
        raise BaselineError(f"the break-even was not measured: {found['problem'] or found['not_run']}")
    whole, rest = map(ttfts_s, found["measurements"])
    saved_s = statistics.median(one - other for one, other in zip(whole, rest, strict=True))
    if saved_s <= 0:
        raise BaselineError("computing the prefix takes no time")
    return case.prefix_tokens * settings.shape.token_bytes / saved_s


def link_row(factor: float, bytes_per_s: float, measured: Sequence[Json]) -> dict[str, Any]:
    """What was seen over a link of so much; `best` is the better of loading all and computing all, by the medians."""
    (ways,) = by_case(measured) or [{}]
    best, ours = best_of(ways, (Way.RECOMPUTE, Way.LAYERWISE)), ways.get(Way.ADVISED.value)

    def counted(row: Json, name: str) -> list[float]:
        return [sample["counters"].get(name, 0.0) for sample in row["samples"]]

    return {
        "factor": factor,
        "link_bytes_per_s": bytes_per_s,
        "ttfts_s": {way: ttfts_s(row) for way, row in ways.items()},
        "loaded_tokens": {way: counted(row, "loaded_tokens") for way, row in ways.items()},
        "late_loads": 0 if ours is None else sum(counted(ours, "late_loads")),
        "advised_over_best": None if ours is None or best is None else ratio(ours, best),
        "best": None if best is None else best["way"],
    }


def is_met(links: Sequence[Json]) -> bool:
    """Whether advised is within LIMIT of the better at every rate, by the medians of the rounds."""
    found = [link["advised_over_best"] for link in links]
    return all(each is not None and each["median"] <= LIMIT for each in found)


ENGINES = (2, 4)
LINK_SHARE = 0.5
"""The link has this part of what would hide every load under what its engine computes."""
NO_LIMIT_BYTES_PER_S = 1e12
WARM_UPS_MAX = 9
PROFILE_HIT_RATE = 0.5
"""What `objectcache calibrate model` assumes unless told."""
BOUND = 1.25
"""Nobody passes so many times an equal share's TTFT, whatever others state."""
LIE = 0.1
"""The liar states this part of its compute time a layer. The less it states, the sooner its layers seem due."""
LIAR = 0
"""The engine that lies."""


class Condition(Enum):
    """How the link is shared, and which compute times the engines state."""

    NO_LIMIT = "no_limit"
    EQUAL = "equal"
    PROFILE = "profile"
    STATED = "stated"
    LIAR = "liar"


Ttfts = Mapping[Condition, Sequence[Sequence[float]]]
"""Seconds by condition, round and engine."""


def measure_stated(settings: EngineSettings, counts: Sequence[int] = ENGINES) -> list[dict[str, Any]]:
    """For each number of engines; wrong tokens end it. Raises BaselineError, LocalServerError, OSError."""
    found: list[dict[str, Any]] = []
    for count in counts:
        cases = [settings.cases[-1 - index % len(settings.cases)] for index in range(count)]
        table = Rules(SLACK, NO_LIMIT_BYTES_PER_S, 0.0, 0.0).table()
        with (
            _configured(settings, (Way.RECOMPUTE, Way.LAYERWISE), table) as (paced, config),
            running_bed(paced) as bed,
            bed.server.client(Transport.HTTP) as client,
        ):
            if bed.missing:
                raise BaselineError("; ".join(bed.missing.values()))
            sharing = _Sharing(bed, ConfiguredServer(bed.server, config, client), _start(bed, count), cases)
            sharing.warm_up()
            found.append(_rounds(sharing))
        if found[-1]["problem"] is not None:
            break
    return found


def _start(bed: Bed, count: int) -> dict[str, Child]:
    """Engines that divide the cores among themselves, so that they disturb each other alike in all conditions."""
    threads = str(max(1, (os.cpu_count() or 1) // count))
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
    names = [f"{Way.STATED.value}-{index}" for index in range(count)]
    return {name: bed.start_engine(Way.STATED, name, environment) for name in names}


@dataclass
class _Sharing:
    """Engines that share a link, one for each case. `costs` are those of the first engine, as a static profile."""

    bed: Bed
    served: ConfiguredServer
    engines: Mapping[str, Child]
    cases: Sequence[Case]
    costs: Mapping[str, float] = field(default_factory=dict)
    link_bytes_per_s: float = 0.0

    def ask(self, round_index: int, cases: Sequence[Case], factors: Sequence[float]) -> list[Answer]:
        """All at once. Raises BaselineError."""
        each = zip(self.engines.items(), cases, factors, strict=True)
        commands = {name: (engine, Command(round_index, case=case, stated=said)) for (name, engine), case, said in each}
        return self.bed.ask_all(commands)

    def warm_up(self) -> None:
        """Shorter prompts of the same kind, until every engine knows what its steps cost; then the costs and the link's
        rate are known. Raises BaselineError where an engine does not learn it.
        """
        self.bed.store(Way.LAYERWISE, WARM_UP_ROUND)
        token_bytes = self.bed.settings.shape.token_bytes
        for index in range(WARM_UPS_MAX):
            shorter = [replace(case, context_tokens=case.context_tokens >> (2 - index % 3)) for case in self.cases]
            answers = self.ask(WARM_UP_ROUND, shorter, [1.0] * len(shorter))
            if index % 3 == 2 and all(answer.layer_compute_us for answer in answers):
                self.costs = answers[0].costs
                prefix_bytes = [case.prefix_tokens * token_bytes for case in self.cases]
                self.link_bytes_per_s = link_bytes_per_s(prefix_bytes, [answer.ttft_s for answer in answers])
                return
        raise BaselineError(f"after {WARM_UPS_MAX} prompts not every engine knows what its steps cost")

    def go_by(self, condition: Condition) -> None:
        """With the table of costs that the server uses for descriptors that state no compute time."""
        shape = self.bed.settings.shape
        profile = {"num_layers": shape.num_layers, "token_layer_bytes": shape.token_layer_bytes, **self.costs}
        lines = [f"{name} = {value!r}" for name, value in (*profile.items(), ("hit_rate", PROFILE_HIT_RATE))]
        variant = EQUAL_WORK_CONSERVING if condition is Condition.EQUAL else SLACK
        rate = NO_LIMIT_BYTES_PER_S if condition is Condition.NO_LIMIT else self.link_bytes_per_s
        table = "\n".join(["[[compute_profiles]]", 'name = "bench"', *lines, "", ""])
        go_by(self.served, table, Rules(variant, rate, 0.0, 0.0))

    def problems(self, answers: Sequence[Answer], wanted: Mapping[Case, Sequence[int]]) -> Iterator[str]:
        """Reasons not to count the run: wrong tokens, a prefix that was not loaded, or an engine that did not know its
        compute time.
        """
        for case, answer in zip(self.cases, answers, strict=True):
            if found := wrong(Way.STATED, case, answer, wanted[case], self.bed.settings.chunk_tokens):
                yield found
            elif not answer.layer_compute_us:
                yield f"{case.title}: no compute time was known"


def link_bytes_per_s(prefix_bytes: Sequence[int], ttfts_s: Sequence[float]) -> float:
    """A link that carries LINK_SHARE of what would hide every load: TTFTs are those without a limit."""
    return LINK_SHARE * sum(nbytes / ttft_s for nbytes, ttft_s in zip(prefix_bytes, ttfts_s, strict=True))


def factors(condition: Condition, count: int) -> list[float]:
    """How much of its compute time each engine states."""
    said = [0.0 if condition is Condition.PROFILE else 1.0] * count
    if condition is Condition.LIAR:
        said[LIAR] = LIE
    return said


def _rounds(sharing: _Sharing) -> dict[str, Any]:
    ttfts_s: dict[Condition, list[list[float]]] = {condition: [] for condition in Condition}
    stated: list[list[int]] = []
    problem: str | None = None
    bed, runs, cases = sharing.bed, sharing.bed.settings.runs, sharing.cases
    with progress_bar(runs * len(Condition), f"{len(cases)} engines") as advance:
        for index in range(1, runs + 1):
            bed.store(Way.LAYERWISE, index)
            wanted = {case: bed.measure(Way.RECOMPUTE, case, index).tokens for case in dict.fromkeys(cases)}
            for condition in RoundTurns.ROTATING.ordered(list(Condition), index):
                sharing.go_by(condition)
                answers = sharing.ask(index, cases, factors(condition, len(cases)))
                for found in sharing.problems(answers, wanted):
                    problem = problem or f"{condition.value.replace('_', ' ')}: {found}"
                ttfts_s[condition].append([answer.ttft_s for answer in answers])
                if condition is Condition.STATED:
                    stated.append([answer.layer_compute_us for answer in answers])
                advance(1)
    return {
        "engines": len(cases),
        "cases": [case.title for case in cases],
        "link_bytes_per_s": sharing.link_bytes_per_s,
        "profile": sharing.costs,
        "lie": LIE,
        "ttfts_s": {condition.value: seen for condition, seen in ttfts_s.items()},
        "layer_compute_us": stated,
        **judged(ttfts_s),
        "problem": problem,
    }


def judged(ttfts_s: Ttfts) -> dict[str, Any]:
    """Added TTFTs of all engines together, their ratios (None where stating left nothing to wait for), and TTFTs beside
    a liar: of the honest engine that is worst in its round, and of the liar. The bound is kept where no honest engine
    passes it by the median of the rounds.
    """
    seen = {condition.value: np.array(rounds) for condition, rounds in ttfts_s.items()}
    no_limit = seen.pop(Condition.NO_LIMIT.value)
    added = {name: (ttfts - no_limit).sum(axis=1) for name, ttfts in seen.items()}
    found: dict[str, Any] = {"added_ttft_s": {name: _spread_of(seconds) for name, seconds in added.items()}}
    is_added = added["stated"].min() > 0
    for name in ("profile", "equal"):
        found[f"added_ttft_{name}_over_stated"] = _spread_of(added[name] / added["stated"]) if is_added else None
    over = {name: seen["liar"] / seen[name] for name in ("equal", "stated")}
    for name, ratios in over.items():
        found[f"honest_ttft_over_{name}"] = _spread_of(np.delete(ratios, LIAR, axis=1).max(axis=1))
    found["liar_ttft_over_stated"] = _spread_of(over["stated"][:, LIAR])
    return {**found, "bound": BOUND, "is_bound_kept": found["honest_ttft_over_equal"]["median"] <= BOUND}


def _spread_of(values: np.ndarray) -> dict[str, float]:
    return asdict(spread(values.tolist()))
