"""Real engines behind the orchestrator: prompts of the conversation trace at this machine's size, every policy at
several rates; and 003's measured tables with vLLM in place of Ollama.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.beds.counters import counted
from bench.beds.kv_peers.work import S3Target
from bench.beds.orchestrators import ADMIN, orchestrator_process
from bench.beds.ours import Servers, target_of
from bench.beds.processes import BaselineError
from bench.beds.vllm_requests import StreamAnswer, StreamRequest, ask
from bench.beds.vllm_servers import VllmServer, make_model, vllm_servers
from bench.paper.tiers.replay import Trace, read
from objectcache.calibration.samples import progress_bar, spread
from objectcache.orchestrator.rules.policies import PolicyName

SCALE = 16
"""A block of the trace has 512 tokens; here it has 32, and the outputs are as much shorter."""
BLOCK_TOKENS = 32
PROMPT_TOKENS_MAX = 3072
HIDDEN_SIZE, LAYERS = 512, 6
WARM_REQUESTS = 8
REQUEST_S = 300.0
BUCKET = "chunks"
TURNS, FIRST_TURN_TOKENS_MIN = 4, 512
OUTPUT_TOKENS = 8
AT_ONCE = (1, 3, 5, 10)


@dataclass(frozen=True, slots=True)
class LiveRun:
    """One run: the answers, the TTFT that was predicted for each, the seconds until the last one ended, and of all
    prompts the tokens that engines had in their own blocks, and those that they loaded from the store.
    """

    answers: tuple[StreamAnswer, ...]
    predicted_s: tuple[float, ...]
    wall_s: float
    hbm_tokens: int
    store_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompts of all requests have."""
        return sum(each.prompt_tokens for each in self.answers)

    @property
    def ttft_over_predicted(self) -> float:
        """The median."""
        pairs = zip(self.answers, self.predicted_s, strict=True)
        return float(np.median([each.ttft_s / expected_s for each, expected_s in pairs]))


class WrongTokensError(Exception):
    """A policy's answer is not the one of an engine that was asked directly."""


def live_requests(count: int, rate_per_s: float, seed: int) -> list[StreamRequest]:
    """The first turns of the trace's first conversations that are long enough and fit, in the trace's order, as a
    Poisson process. The tokens of a block are made from its number. A conversation is a session.
    """
    random = np.random.default_rng(seed)
    known = enumerate(conversations(-(-count // TURNS)))
    turns = sorted((*turn, f"session-{number}") for number, conversation in known for turn in conversation)[:count]
    times_s = np.cumsum(random.exponential(1 / rate_per_s, len(turns)))
    return [
        StreamRequest(float(at_s), _tokens(blocks, nbytes), OUTPUT_TOKENS, session)
        for at_s, (_, blocks, nbytes, session) in zip(times_s, turns, strict=True)
    ]


Turn = tuple[int, tuple[int, ...], int]
"""A request of the trace: its place there, its blocks, and its tokens here."""


def conversations(count: int) -> list[list[Turn]]:
    """The first conversations whose turns fit: a turn goes on where its blocks but the last few are those of an earlier
    one. Raises ValueError where there are too few.
    """
    begun: list[list[Turn]] = []
    of_prefix: dict[tuple[int, ...], list[Turn]] = {}
    for place, each in enumerate(read(Trace.CONVERSATION).requests):
        blocks = tuple(int(str(key)) for key in each.keys)
        tokens = max(BLOCK_TOKENS, sum(each.sizes_bytes) // SCALE)
        if tokens > PROMPT_TOKENS_MAX:
            continue
        known = (of_prefix.get(blocks[:end]) for end in range(len(blocks) - 1, 1, -1))
        mine = next((conversation for conversation in known if conversation is not None), None)
        if mine is None:
            mine = []
            if tokens >= FIRST_TURN_TOKENS_MIN:
                begun.append(mine)
        mine.append((place, blocks, tokens))
        for end in range(2, len(blocks) + 1):
            of_prefix.setdefault(blocks[:end], mine)
    long = [conversation[:TURNS] for conversation in begun if len(conversation) >= TURNS]
    if len(long) < count:
        raise ValueError(f"the trace has no {count} conversations of this size")
    return long[:count]


def _tokens(blocks: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple([token for block in blocks for token in block_tokens(block)][:count])


def block_tokens(number: int) -> list[int]:
    """The tokens of a block of the trace."""
    return [int(each) for each in np.random.default_rng(number).integers(10, 1000, BLOCK_TOKENS)]


@contextmanager
def live_bed(folder: Path, engine_count: int) -> Iterator[tuple[list[VllmServer], S3Target, Servers]]:
    """Engines over a store of ours."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        servers = Servers(stack, folder, "orchestrator")
        store = servers.serve()
        store.make_bucket(BUCKET)
        target = target_of(store, BUCKET)
        model = servers.folder / "model"
        make_model(model, hidden_size=HIDDEN_SIZE, layers=LAYERS)
        engines = stack.enter_context(vllm_servers(servers.folder, model, engine_count, target))
        yield engines, target, servers


def run_policy(
    engines: Sequence[VllmServer], target: S3Target, policy: PolicyName, requests: Sequence[StreamRequest], salt: str
) -> LiveRun:
    """All requests through an orchestrator with this policy. The salt makes everything cold: no block or chunk of
    another run has these names.
    """
    for engine in engines:
        engine.forget()
    environment = {"AWS_ACCESS_KEY_ID": target.access_key, "AWS_SECRET_ACCESS_KEY": target.secret_key}
    options = ("--store", target.url, "--policy", policy.value)
    with orchestrator_process([engine.url for engine in engines], *options, environment=environment) as (url, _):
        return asyncio.run(_run(url, requests, salt))


async def _run(url: str, requests: Sequence[StreamRequest], salt: str) -> LiveRun:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as http:
        for _ in range(200):
            async with http.get(f"{url}/_orchestrator/status", headers=ADMIN) as answer:
                engines = (await answer.json())["engines"]
            if all(each["status"] == "up" and each["events"] for each in engines):
                break
            await asyncio.sleep(0.1)
        for at in range(WARM_REQUESTS):
            await ask(http, url, StreamRequest(0.0, tuple(block_tokens(10_000_000 + at) * 4), 4), f"{salt} warm")
        before = await _hit_tokens(http, [each["url"] for each in engines])
        began_s = time.monotonic()

        async def one(request: StreamRequest) -> StreamAnswer:
            await asyncio.sleep(max(0.0, began_s + request.at_s - time.monotonic()))
            return await ask(http, url, request, salt)

        answers = await asyncio.gather(*map(one, requests))
        wall_s = time.monotonic() - began_s
        after = await _hit_tokens(http, [each["url"] for each in engines])
        predicted_s = [await _predicted_s(http, url, each.request_id) for each in answers]
        return LiveRun(tuple(answers), tuple(predicted_s), wall_s, after[0] - before[0], after[1] - before[1])


async def _predicted_s(http: aiohttp.ClientSession, url: str, request_id: str) -> float:
    """The TTFT that was predicted for a request on its engine, by its receipt."""
    async with http.get(f"{url}/_orchestrator/receipts/{request_id}", headers=ADMIN) as answer:
        return float((await answer.json())["predictions"][0]["ttft_s"])


async def _hit_tokens(http: aiohttp.ClientSession, engines: Sequence[str]) -> tuple[int, int]:
    """Prompt tokens that engines had in their own blocks, and those that they loaded, since they started."""
    hbm, store = (f"vllm:objectcache_{name}_hit_tokens_total" for name in ("hbm", "store"))
    found = []
    for url in engines:
        async with http.get(f"{url}/metrics") as answer:
            found.append(counted(await answer.text(), (hbm, store)))
    return round(sum(each[hbm] for each in found)), round(sum(each[store] for each in found))


def live(
    engines: Sequence[VllmServer], target: S3Target, policies: Sequence[PolicyName], rates: Sequence[float], count: int,
    runs: int, seed: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every policy at every rate, by turns within a round. Raises WrongTokensError where answers differ."""
    found: list[dict[str, Any]] = []
    warming = live_requests(count, max(rates), seed)  # the engines learn the costs of their steps
    run_policy(engines, target, PolicyName.ROUND_ROBIN, warming, "not counted")
    with progress_bar(len(rates) * runs * len(policies), "live") as advance:
        for rate in rates:
            taken: dict[PolicyName, list[LiveRun]] = {policy: [] for policy in policies}
            for round_index in range(runs):
                requests = live_requests(count, rate, seed + round_index)
                order = policies if round_index % 2 == 0 else tuple(reversed(policies))
                texts: list[str] | None = None
                for policy in order:
                    salt = f"{rate} {round_index} {policy.value}"
                    made = run_policy(engines, target, policy, requests, salt)
                    if texts is not None and texts != [each.text for each in made.answers]:
                        raise WrongTokensError(f"{policy.value} at {rate}/s: other tokens than the policy before it")
                    texts = [each.text for each in made.answers]
                    taken[policy].append(made)
                    advance(1)
            found.append(
                {"rate_per_s": rate, "policies": {name.value: _figures(runs_) for name, runs_ in taken.items()}}
            )
    return found


def _figures(runs: Sequence[LiveRun]) -> dict[str, Any]:
    def percentile(share: float) -> list[float]:
        return [float(np.percentile([each.ttft_s for each in run.answers], share)) for run in runs]

    return {
        "ttft_p50_s": percentile(50), "ttft_p90_s": percentile(90), "ttft_slowest_s": percentile(100),
        "ttft_over_predicted": [run.ttft_over_predicted for run in runs],
        "requests_per_s": [len(run.answers) / run.wall_s for run in runs],
        "hbm_hit_rate": [run.hbm_tokens / run.prompt_tokens for run in runs],
        "store_hit_rate": [run.store_tokens / run.prompt_tokens for run in runs],
        "longest_s": [max(each.total_s for each in run.answers) for run in runs],
        "engines": [len({each.engine for each in run.answers}) for run in runs],
    }  # fmt: skip


def serving(engines: Sequence[VllmServer], target: S3Target, runs: int) -> dict[str, Any]:
    """003's tables, each number a spread of so many runs: cold, warm, prefix, unrelated; and 1, 3, 5, 10 at once,
    bounded and not.
    """
    taken = [_serving(engines, target) for _ in range(runs)]
    steps = {name: _spreads([run["steps"][name] for run in taken]) for name in taken[0]["steps"]}
    at_once = [_spreads([run["at_once"][place] for run in taken]) for place in range(len(AT_ONCE))]
    return {"steps": steps, "at_once": at_once, "controlled": _spreads([run["controlled"] for run in taken])}


def _spreads(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {name: spread([row[name] for row in rows]) for name in rows[0]}


def _serving(engines: Sequence[VllmServer], target: S3Target) -> dict[str, Any]:
    first = tuple(token for at in range(40) for token in block_tokens(20_000_000 + at))
    other = tuple(token for at in range(40) for token in block_tokens(30_000_000 + at))
    environment = {"AWS_ACCESS_KEY_ID": target.access_key, "AWS_SECRET_ACCESS_KEY": target.secret_key}
    urls = [engine.url for engine in engines]
    with orchestrator_process(urls, "--store", target.url, environment=environment) as (url, _):
        steps = asyncio.run(_steps(url, first, other))
        at_once = [asyncio.run(_at_once(url, count, first)) for count in AT_ONCE]
    with tempfile.TemporaryDirectory() as folder:
        bounded = Path(folder) / "bounded.toml"
        bounded.write_text("[orchestrator]\nactive_max = 3\n[internals.orchestrator]\nqueue_max = 0\n")
        options = ("--store", target.url, "--config", str(bounded))
        with orchestrator_process(urls, *options, environment=environment) as (url, _):
            controlled = asyncio.run(_at_once(url, 10, first))
    return {"steps": steps, "at_once": at_once, "controlled": controlled}


async def _ready(http: aiohttp.ClientSession, url: str) -> None:
    for _ in range(300):
        async with http.get(f"{url}/health") as answer:
            if answer.status == 200:
                return
        await asyncio.sleep(0.1)
    raise BaselineError("the orchestrator has no engine")


async def _steps(url: str, first: tuple[int, ...], other: tuple[int, ...]) -> dict[str, dict[str, float]]:
    salt = f"serving {time.time()}"
    found = {}
    async with aiohttp.ClientSession() as http:
        await _ready(http, url)
        prefix = (*first[: len(first) * 3 // 4], *other[: len(other) // 4])
        for name, tokens in (("cold", first), ("warm", first), ("prefix", prefix), ("unrelated", other)):
            answer = await ask(http, url, StreamRequest(0.0, tokens, 32), salt)
            found[name] = {
                "total_ms": answer.total_s * 1e3, "prompt_ms": answer.ttft_s * 1e3,
                "decode_ms": (answer.total_s - answer.ttft_s) * 1e3, "cached_tokens": answer.cached_tokens,
            }  # fmt: skip
            await asyncio.sleep(1.0)
    return found


async def _at_once(url: str, count: int, tokens: tuple[int, ...]) -> dict[str, float]:
    """The same prompt so many times at once, as 003 does."""
    salt = f"at once {count} {time.time()}"
    async with aiohttp.ClientSession() as http:
        await _ready(http, url)
        began_s = time.monotonic()

        async def one() -> float | None:
            try:
                return (await ask(http, url, StreamRequest(0.0, tokens, 32), salt)).total_s
            except BaselineError:
                return None

        taken = await asyncio.gather(*(one() for _ in range(count)))
        wall_s = time.monotonic() - began_s
    done = [each for each in taken if each is not None]
    return {
        "count": count, "accepted": len(done), "average_ms": float(np.mean(done)) * 1e3,
        "p95_ms": float(np.percentile(done, 95)) * 1e3, "wall_ms": wall_s * 1e3, "per_s": len(done) / wall_s,
    }  # fmt: skip
