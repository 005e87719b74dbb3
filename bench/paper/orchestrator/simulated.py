"""Every policy on the same simulated engines and requests, and the distance of decisions from the best ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np

from bench.core.show import Json
from bench.paper.tiers.replay import Trace, read
from objectcache.calibration.samples import progress_bar
from objectcache.orchestrator.rules.policies import PolicyName
from objectcache.orchestrator.simulation import (
    SimulatedEngine,
    SimulatedRequest,
    SimulatedStore,
    Simulation,
    summary,
    with_bursts,
)

TOKEN_US = 60.0
"""A prompt token of a mid-sized model on one GPU; about 17,000 tokens/s."""
DECODE_S = 0.02
ROOM_BLOCKS = 600
"""Blocks of 512 tokens that an engine holds: 307,200 tokens."""
LINK_BYTES_PER_S, SLOW_LINK_BYTES_PER_S = 12.5e9, 0.6e9
LOADS = (0.5, 0.9)
"""Arrivals, as parts of what the engines could compute if they held and loaded nothing of the prompts' repetitions."""
OUTPUT_TOKENS = {Trace.CONVERSATION: 343, Trace.SYNTHETIC: 149}
"""The traces' averages: their compact form has no output lengths."""
REGRET_REQUESTS, REGRET_ENGINES = 6, 3


class Arrivals(Enum):
    """When requests come."""

    RECORDED = "recorded"
    POISSON = "poisson"
    BURSTS = "bursts of up to 16"


class Engines(Enum):
    """The kinds of simulated engines."""

    EQUAL = "equal"
    UNEQUAL = "half of them at half speed"
    LOST = "one lost in the middle"
    MISJUDGED = "costs believed half to double"


@dataclass(frozen=True, slots=True)
class SimulatedCase:
    """One case. `load` is the part of the engines' time that the prompts would take without any reuse."""

    trace: Trace
    engine_count: int
    arrivals: Arrivals
    engines: Engines
    load: float
    link_bytes_per_s: float
    request_count: int
    seed: int

    def to_json(self) -> dict[str, Any]:
        """As it is published."""
        return {
            "trace": self.trace.value, "engines": self.engine_count, "arrivals": self.arrivals.value,
            "kind": self.engines.value, "load": self.load, "link_bytes_per_s": self.link_bytes_per_s,
        }  # fmt: skip


def cases(counts: Sequence[int], request_count: int, seed: int) -> Iterator[SimulatedCase]:
    """Every count of engines on both traces; the other variations at the first count."""

    def case(trace: Trace, count: int, **changes: Any) -> SimulatedCase:
        plain: dict[str, Any] = {
            "arrivals": Arrivals.POISSON, "engines": Engines.EQUAL, "load": LOADS[1],
            "link_bytes_per_s": LINK_BYTES_PER_S * count / 8,
        }  # fmt: skip
        return SimulatedCase(trace, count, request_count=request_count, seed=seed, **{**plain, **changes})

    first = counts[0]
    for trace in Trace:
        for count in counts:
            yield case(trace, count)
        yield case(trace, first, load=LOADS[0])
        yield case(trace, first, arrivals=Arrivals.BURSTS)
        yield case(trace, first, engines=Engines.UNEQUAL)
        yield case(trace, first, engines=Engines.LOST)
        yield case(trace, first, engines=Engines.MISJUDGED)
        yield case(trace, first, link_bytes_per_s=SLOW_LINK_BYTES_PER_S)


def requests_of(case: SimulatedCase) -> list[SimulatedRequest]:
    """The case's requests."""
    output = OUTPUT_TOKENS[case.trace]
    found = [replace(each, output_tokens=output) for each in _recorded(case.trace, case.request_count)]
    if case.arrivals is Arrivals.RECORDED:
        return found
    tokens = float(np.mean([each.prompt_tokens for each in found]))
    rate = case.load * speeds(case) / (tokens * TOKEN_US * 1e-6)
    return with_bursts(found, rate, 16 if case.arrivals is Arrivals.BURSTS else 1, case.seed)


@cache
def _recorded(trace: Trace, count: int) -> tuple[SimulatedRequest, ...]:
    """The requests of a trace, read once in each process."""
    return tuple(
        SimulatedRequest(each.now_s, tuple(int(str(key)) for key in each.keys), sum(each.sizes_bytes), 0)
        for each in read(trace, count).requests
    )


def speeds(case: SimulatedCase) -> float:
    """How many engines of full speed those of the case are."""
    return case.engine_count * (0.75 if case.engines is Engines.UNEQUAL else 1.0)


def run_case(case: SimulatedCase, policy: PolicyName) -> dict[str, float]:
    """The figures of one policy."""
    requests = requests_of(case)
    end_s = max(each.at_s for each in requests)
    errors = 2.0 ** np.random.default_rng(case.seed).uniform(-1, 1, case.engine_count)
    engines = []
    for at in range(case.engine_count):
        slow = case.engines is Engines.UNEQUAL and at % 2 == 1
        lost = case.engines is Engines.LOST and at == 0
        believed_us = TOKEN_US * float(errors[at]) if case.engines is Engines.MISJUDGED else None
        lost_s = end_s / 2 if lost else None
        engines.append(SimulatedEngine(TOKEN_US * (2 if slow else 1), DECODE_S, 64, ROOM_BLOCKS, lost_s, believed_us))
    blocks = len({block for each in requests for block in each.blocks})
    store = SimulatedStore(max(1, blocks), case.link_bytes_per_s)
    return summary(Simulation(engines, policy, store).run(requests))


def simulated(counts: Sequence[int], request_count: int, seed: int, processes: int) -> list[Json]:
    """Every case with every policy, and our TTFT over the best of the others."""
    wanted = [(case, policy) for case in cases(counts, request_count, seed) for policy in PolicyName]
    with ProcessPoolExecutor(processes) as pool:
        taken = []
        with progress_bar(len(wanted), "simulated") as advance:
            for each in pool.map(_run, wanted):
                taken.append(each)
                advance(1)
    found: list[Json] = []
    for at in range(0, len(wanted), len(PolicyName)):
        case = wanted[at][0]
        by_policy = {policy.value: taken[at + place] for place, policy in enumerate(PolicyName)}
        found.append({**case.to_json(), "policies": by_policy, **over_others(by_policy)})
    return found


def over_others(by_policy: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Best other policy's TTFT over ours: more than 1 where ours is sooner. Each percentile has its own best other."""
    ours = by_policy[PolicyName.TTFT.value]
    found: dict[str, Any] = {}
    for name in ("ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_mean_s"):
        others = {policy: row[name] for policy, row in by_policy.items() if policy != PolicyName.TTFT.value}
        best = min(others, key=others.__getitem__)
        found[name.replace("_s", "_over")] = {"best_other": best, "ratio": others[best] / max(ours[name], 1e-9)}
    return found


def _run(wanted: tuple[SimulatedCase, PolicyName]) -> dict[str, float]:
    return run_case(*wanted)


def regret(seeds: Sequence[int]) -> list[float]:
    """Mean TTFT of ours over that of the best assignment of few requests to few engines, all tried: 0.1 is 10 % more.
    Arrivals and prompts are random; prompts share beginnings.
    """
    return [one_regret(seed) for seed in seeds]


def one_regret(seed: int) -> float:
    """The regret of one random case."""
    random = np.random.default_rng(seed)
    requests, now_s = [], 0.0
    for _ in range(REGRET_REQUESTS):
        now_s += float(random.exponential(0.15))
        family, length = int(random.integers(3)), int(random.integers(2, 12))
        shared = int(random.integers(1, length + 1))
        own = [int(random.integers(1 << 40)) for _ in range(length - shared)]
        blocks = (*(family * 1000 + at for at in range(shared)), *own)
        requests.append(SimulatedRequest(now_s, blocks, length * 512, 10))
    engines = [SimulatedEngine(TOKEN_US, 0.0) for _ in range(REGRET_ENGINES)]
    ours = summary(Simulation(engines, PolicyName.TTFT).run(requests))["ttft_mean_s"]
    best = min(map(partial(_assigned, requests), product(range(REGRET_ENGINES), repeat=len(requests))))
    return ours / best - 1


def _assigned(requests: Sequence[SimulatedRequest], engines: Sequence[int]) -> float:
    """Mean TTFT of an assignment, by the same rules as the simulation's without a store."""
    free_s = [0.0] * REGRET_ENGINES
    held: list[set[int]] = [set() for _ in range(REGRET_ENGINES)]
    total_s = 0.0
    for request, at in zip(requests, engines, strict=True):
        blocks = request.blocks[: (request.prompt_tokens - 1) // 512]
        count = next((index for index, block in enumerate(blocks) if block not in held[at]), len(blocks))
        free_s[at] = max(free_s[at], request.at_s) + (request.prompt_tokens - count * 512) * TOKEN_US * 1e-6
        held[at] |= set(request.blocks)
        total_s += free_s[at] - request.at_s
    return total_s / len(requests)
