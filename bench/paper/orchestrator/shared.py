"""One system prompt that all clients share: how requests spread over engines, and what one that joins gets of them;
simulated, and with real engines.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np

from bench.beds.kv_peers.work import S3Target
from bench.beds.orchestrators import ADMIN, orchestrator_process
from bench.beds.processes import BaselineError
from bench.beds.vllm_requests import StreamAnswer, StreamRequest, ask
from bench.beds.vllm_servers import VllmServer
from bench.core.rounds import interval
from bench.paper.orchestrator.live import REQUEST_S, WARM_REQUESTS, WrongTokensError, block_tokens
from objectcache.calibration.samples import progress_bar, spread
from objectcache.orchestrator.rules.policies import PolicyName
from objectcache.orchestrator.simulation import SimulatedEngine, SimulatedRequest, Simulation, summary

POLICIES = (PolicyName.TTFT, PolicyName.PREFIX_HASH, PolicyName.ROUND_ROBIN, PolicyName.LEAST_LOAD)
OURS = PolicyName.TTFT
ENGINE = SimulatedEngine(59.0, 0.008, blocks_max=2000, decode_growth_s=0.0002)
"""A token of a prompt takes 59 µs, a step with one stream 8 ms, and each further stream 0.2 ms of a step."""
SIMULATED_REQUESTS, SIMULATED_PER_S, JOINS_AT_S = 400, 10.0, 20.0
CLIENTS = 12
SHARED_BLOCKS, OWN_BLOCKS = 32, 2
OUTPUT_TOKENS = 24
JOINED_S = 60.0


def shared_beginning(count: int, rate_per_s: float) -> list[SimulatedRequest]:
    """Prompts that begin with the same 2,048 tokens, and have 64 more; answers of 200 tokens."""
    return [SimulatedRequest(at / rate_per_s, (0, 1, 2, 3), 4 * 512 + 64, 200) for at in range(count)]


def simulated_shared() -> dict[str, Any]:
    """Three engines, all there from the beginning, or one that joins in the middle: requests of each, and times."""
    requests = shared_beginning(SIMULATED_REQUESTS, SIMULATED_PER_S)
    cases = {"three engines": [ENGINE] * 3, "the third joins": [ENGINE, ENGINE, replace(ENGINE, joins_at_s=JOINS_AT_S)]}
    found: dict[str, Any] = {}
    for (case, engines), policy in itertools.product(cases.items(), POLICIES):
        outcomes = Simulation(engines, policy).run(requests)
        known = summary(outcomes)
        found.setdefault(case, {})[policy.value] = {
            "requests_by_engine": [sum(each.engine == at for each in outcomes) for at in range(len(engines))],
            "whole_mean_s": known["whole_mean_s"],
            "ttft_p90_s": known["ttft_p90_s"],
        }
    return found


def live_shared(engines: Sequence[VllmServer], target: S3Target, requests_each: int, runs: int) -> dict[str, Any]:
    """All engines but the last are there at first, and the last one joins when half of the requests have ended. Every
    policy, by turns within a round. Raises WrongTokensError where answers differ, BaselineError.
    """
    taken: dict[PolicyName, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    _run_policy(engines, target, OURS, "not counted", requests_each)  # the engines learn the costs of their steps
    with progress_bar(runs * len(POLICIES), "shared beginning") as advance:
        for round_index in range(runs):
            order = POLICIES if round_index % 2 == 0 else tuple(reversed(POLICIES))
            texts: dict[int, str] | None = None
            for policy in order:
                salt = f"shared {round_index} {policy.value}"
                answers = _run_policy(engines, target, policy, salt, requests_each)
                if texts is not None and texts != {at: each.text for at, each in answers.items()}:
                    raise WrongTokensError(f"{policy.value}: other tokens than the policy before it")
                texts = {at: each.text for at, each in answers.items()}
                taken[policy].append(_figures(answers, [engine.url for engine in engines]))
                advance(1)
    found = {policy.value: _of_policy(rows) for policy, rows in taken.items()}
    ours = [row["whole_mean_s"] for row in taken[OURS]]
    over = {
        policy.value: interval([row["whole_mean_s"] / own for row, own in zip(rows, ours, strict=True)])
        for policy, rows in taken.items()
        if policy is not OURS
    }
    return {"policies": found, "whole_mean_over_ours": over, "clients": CLIENTS, "requests_each": requests_each}


def _of_policy(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    times = {name: spread([row[name] for row in rows]) for name in ("whole_mean_s", "ttft_p50_s", "ttft_p90_s")}
    counts = {name: [row[name] for row in rows] for name in ("before", "after")}
    return {**times, **counts, "joined_share": spread([row["after"][-1] / max(1, sum(row["after"])) for row in rows])}


def _figures(answers: Mapping[int, StreamAnswer], urls: Sequence[str]) -> dict[str, Any]:
    """Requests of each engine before and after the last one joined, and times of all."""
    half = len(answers) // 2
    firsts = [each for at, each in sorted(answers.items()) if at < half]
    seconds = [each for at, each in sorted(answers.items()) if at >= half]
    ttfts = [each.ttft_s for each in answers.values()]
    return {
        "before": [sum(each.engine == url for each in firsts) for url in urls],
        "after": [sum(each.engine == url for each in seconds) for url in urls],
        "whole_mean_s": float(np.mean([each.total_s for each in answers.values()])),
        "ttft_p50_s": float(np.percentile(ttfts, 50)),
        "ttft_p90_s": float(np.percentile(ttfts, 90)),
    }


def _run_policy(
    engines: Sequence[VllmServer], target: S3Target, policy: PolicyName, salt: str, requests_each: int
) -> dict[int, StreamAnswer]:
    for engine in engines:
        engine.forget()
    environment = {"AWS_ACCESS_KEY_ID": target.access_key, "AWS_SECRET_ACCESS_KEY": target.secret_key}
    options = ("--store", target.url, "--policy", policy.value)
    urls = [engine.url for engine in engines]
    with orchestrator_process(urls[:-1], *options, environment=environment) as (url, _):
        return asyncio.run(_run(url, urls, salt, requests_each))


async def _run(url: str, urls: Sequence[str], salt: str, requests_each: int) -> dict[int, StreamAnswer]:
    shared = tuple(token for at in range(SHARED_BLOCKS) for token in block_tokens(40_000_000 + at))
    answers: dict[int, StreamAnswer] = {}
    numbers = itertools.count()

    async def client(http: aiohttp.ClientSession, end: int) -> None:
        while (number := next(numbers)) < end:
            own = tuple(token for at in range(OWN_BLOCKS) for token in block_tokens(50_000_000 + 10 * number + at))
            answers[number] = await ask(http, url, StreamRequest(0.0, shared + own, OUTPUT_TOKENS), salt)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as http:
        await _up(http, url, urls[:-1])
        for at in range(WARM_REQUESTS):
            await ask(http, url, StreamRequest(0.0, tuple(block_tokens(10_000_000 + at) * 4), 4), f"{salt} warm")
        half = CLIENTS * requests_each // 2
        await asyncio.gather(*(client(http, half) for _ in range(CLIENTS)))
        async with http.post(f"{url}/_orchestrator/engines", json={"url": urls[-1]}, headers=ADMIN) as answer:
            if answer.status != 201:
                raise BaselineError(f"the engine cannot join: {answer.status} {(await answer.text())[:200]}")
        await _up(http, url, urls)
        numbers = itertools.count(half)
        await asyncio.gather(*(client(http, 2 * half) for _ in range(CLIENTS)))
    return answers


async def _up(http: aiohttp.ClientSession, url: str, urls: Sequence[str]) -> None:
    until_s = time.monotonic() + JOINED_S
    while True:
        async with http.get(f"{url}/_orchestrator/status", headers=ADMIN) as answer:
            known = {each["url"]: each for each in (await answer.json())["engines"]}
        if all(each in known and known[each]["status"] == "up" and known[each]["events"] for each in urls):
            return
        if time.monotonic() > until_s:
            raise BaselineError("an engine does not join")
        await asyncio.sleep(0.1)
