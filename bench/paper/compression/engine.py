"""End to end: vLLM answers questions about stored contexts, with a store whose DRAM tier compresses, and with one whose
tier does not. The engine has the trained model, so that its answers are worth comparing.

Each context is stored once. Then questions come, about contexts that are drawn by Zipf's law; the engine's own blocks
are forgotten before each, so that the context is loaded. Both stores have the same memory and the same link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.beds.counters import counted, page_of
from bench.beds.ours import Servers, target_of
from bench.beds.processes import BaselineError
from bench.beds.vllm_requests import StreamAnswer, StreamRequest, ask
from bench.beds.vllm_servers import BLOCK_TOKENS, VllmServer, vllm_servers
from bench.paper.compression.sizes import SIZES
from bench.paper.compression.tasks import IGNORED, VOCABULARY, Task, sample
from bench.paper.compression.train import load_model
from objectcache.calibration.samples import progress_bar, spread
from objectcache.calibration.servers import LocalServer

WAYS = ("off", "adaptive")
SKEW = 0.9
REQUEST_S = 60.0
SALT = "compression"
ELEMENT_BYTES = 2
ALPHA_S = 0.5
HOME_OVER_LINK = 0.5
"""The tier is told that its home delivers at half the rate of the link."""
IN_STORE = {"hits": "objectcache_dram_hit_extents_total", "misses": "objectcache_dram_missed_extents_total"}
IN_ENGINE = {
    "loaded": "vllm:objectcache_loaded_chunks_total", "lossy": "vllm:objectcache_lossy_chunks_total",
    "error": "vllm:objectcache_lossy_error_total",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineCase:
    """`contexts` of so many tokens, a DRAM tier with room for `memory_share` of their exact KV, and a link on which the
    exact KV of one takes `load_s`.
    """

    contexts: int
    context_tokens: int
    questions: int
    memory_share: float
    load_s: float


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about a context: the whole prompt, and the tokens of the right answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


Taken = dict[str, list[tuple[Asked, StreamAnswer]]]
"""For each way: the questions, and what was answered."""


def context_bytes(model: str, tokens: int) -> int:
    """The exact KV of a context in bfloat16."""
    size = SIZES[model]
    return 2 * size.layers * size.kv_heads * size.head_dim * tokens * ELEMENT_BYTES


def contexts(case: EngineCase, seed: int) -> list[list[Asked]]:
    """The questions about each context; every task has as many contexts."""
    found = []
    for at in range(case.contexts):
        random = np.random.default_rng((seed, at))
        made = sample(list(Task)[at % len(Task)], case.context_tokens, case.questions, random)
        asked: list[Asked] = []
        start = 0
        ends = np.flatnonzero((made.labels[:-1] != IGNORED) & (made.labels[1:] == IGNORED))
        for end in ends.tolist():
            question = made.questions[start : end + 2].tolist()
            labels = made.labels[start : end + 1]
            answer = tuple(labels[labels != IGNORED].tolist())
            asked.append(Asked((*made.context.tolist(), *question[: len(question) - len(answer)]), answer))
            start = end + 2
        found.append(asked)
    return found


def write_model(name: str, folder: Path) -> None:
    """The trained model as vLLM reads it; token 17 is the word `17`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    load_model(name).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0")  # type: ignore[no-untyped-call]
    wrapped.save_pretrained(folder)


def configuration(way: str, link_bytes_per_s: float) -> str:
    """The store's configuration."""
    text = f"[scheduler]\nlink_bytes_per_s = {link_bytes_per_s:.0f}\n"
    if way == "adaptive":
        text += (
            f'[compression]\npolicy = "adaptive"\nalpha_s = {ALPHA_S}\nmemory_bytes_per_s = {link_bytes_per_s:.0f}\n'
            f"home_bytes_per_s = {link_bytes_per_s * HOME_OVER_LINK:.0f}\n"
        )
    return text


@dataclass(frozen=True, slots=True)
class Stack:
    """An engine, and its store."""

    engine: VllmServer
    store: LocalServer


@contextmanager
def stacks(model: str, case: EngineCase, parent: Path | None) -> Iterator[dict[str, Stack]]:
    """One for each way, over http. Raises BaselineError, LocalServerError."""
    nbytes = context_bytes(model, case.context_tokens)
    dram_bytes = round(case.contexts * nbytes * case.memory_share)
    with ExitStack() as stack:
        servers = Servers(stack, parent, "compression")
        write_model(model, servers.folder / "model")
        found = {}
        for way in WAYS:
            store = servers.serve(configuration(way, nbytes / case.load_s), "--dram-bytes", str(dram_bytes))
            folder = servers.folder / way
            folder.mkdir()
            extra = {"load": "all", "lossy": way, "transport": "http", "lease_s": 0.0}
            running = vllm_servers(
                folder, servers.folder / "model", 1, target_of(store), "--dtype", "bfloat16",
                "--max-model-len", "512", extra=extra,
            )  # fmt: skip
            found[way] = Stack(stack.enter_context(running)[0], store)
        yield found


def end_to_end(
    model: str, case: EngineCase, request_count: int, runs: int, seed: int, parent: Path | None
) -> dict[str, Any]:
    """Both ways, asked in turn. Raises BaselineError where a context was not loaded."""
    known = contexts(case, seed)
    whole_tokens = case.context_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    turns = len(WAYS) * (case.contexts + request_count * (runs + 1))
    with stacks(model, case, parent) as running, progress_bar(turns, "engine") as step:

        async def turn(numbers: Sequence[int], random: np.random.Generator) -> Taken:
            taken: Taken = {way: [] for way in WAYS}
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as http:
                for at, number in enumerate(numbers):
                    asked = known[number][int(random.integers(len(known[number])))]
                    for way in WAYS if at % 2 == 0 else WAYS[::-1]:
                        engine = running[way].engine
                        await asyncio.to_thread(engine.forget)
                        answer = await ask(http, engine.url, StreamRequest(0.0, asked.prompt, len(asked.answer)), SALT)
                        taken[way].append((asked, answer))
                        step(1)
            return taken

        asyncio.run(turn(range(case.contexts), np.random.default_rng(seed)))  # each is computed, and stored
        weights = 1.0 / np.arange(1, case.contexts + 1) ** SKEW
        rounds: list[tuple[Taken, Mapping[str, Mapping[str, float]]]] = []
        for round_index in range(runs + 1):
            random = np.random.default_rng((seed, round_index))
            numbers = random.choice(case.contexts, request_count, p=weights / weights.sum()).tolist()
            before = {way: _counted(each) for way, each in running.items()}
            taken = asyncio.run(turn(numbers, random))
            after = {way: _counted(each) for way, each in running.items()}
            late = [each.cached_tokens for way in WAYS for _, each in taken[way] if each.cached_tokens < whole_tokens]
            if late and round_index:
                raise BaselineError(f"{len(late)} contexts were not loaded whole: {late[:5]} of {whole_tokens} tokens")
            if round_index:  # the first one fills both memories
                counted = {way: {name: after[way][name] - before[way][name] for name in before[way]} for way in WAYS}
                rounds.append((taken, counted))
    return _figures(rounds)


def _figures(rounds: Sequence[tuple[Taken, Mapping[str, Mapping[str, float]]]]) -> dict[str, Any]:
    ways: dict[str, Any] = {}
    for way in WAYS:
        of_way = [taken[way] for taken, _ in rounds]
        counts = [counted[way] for _, counted in rounds]
        ttfts = [[answer.ttft_s for _, answer in each] for each in of_way]
        ways[way] = {
            "ttft_p50_s": [float(np.percentile(each, 50)) for each in ttfts],
            "ttft_p90_s": [float(np.percentile(each, 90)) for each in ttfts],
            "dram_hit_rate": [each["hits"] / max(1.0, each["hits"] + each["misses"]) for each in counts],
            "lossy_share": [each["lossy"] / max(1.0, each["loaded"]) for each in counts],
            "mean_error": [each["error"] / max(1.0, each["loaded"]) for each in counts],
            "right": [_same_share((asked.answer, answer) for asked, answer in each) for each in of_way],
        }
    agreement, pair_over = [], []
    for taken, _ in rounds:
        both = [(exact, lossy) for (_, exact), (_, lossy) in zip(taken["off"], taken["adaptive"], strict=True)]
        agreement.append(_same_share((_tokens(exact), lossy) for exact, lossy in both))
        pair_over.append(float(np.median([exact.ttft_s / lossy.ttft_s for exact, lossy in both])))
    found: dict[str, Any] = {"ways": ways, "agreement": spread(agreement), "ttft_pair_over": spread(pair_over)}
    for name in ("ttft_p50_s", "ttft_p90_s"):
        pairs = zip(ways["off"][name], ways["adaptive"][name], strict=True)
        found[name.replace("_s", "_over")] = spread([off / adaptive for off, adaptive in pairs])
    for figures in ways.values():
        for name in tuple(figures):
            figures[f"{name}_spread"] = spread(figures[name])
    return found


def _tokens(answer: StreamAnswer) -> tuple[int, ...]:
    return tuple(map(int, answer.text.split()))


def _same_share(answers: Iterable[tuple[tuple[int, ...], StreamAnswer]]) -> float:
    """The part of all tokens that are the wanted ones, place by place."""
    same: list[bool] = []
    for wanted, answer in answers:
        got = _tokens(answer)
        if len(got) != len(wanted):
            raise BaselineError(f"{len(got)} tokens were answered, {len(wanted)} asked for: {answer.text!r}")
        same += [one == other for one, other in zip(got, wanted, strict=True)]
    return sum(same) / len(same)


def _counted(stack: Stack) -> Mapping[str, float]:
    """Counts of the store and of the engine since they started."""
    in_store = counted(page_of(stack.store), tuple(IN_STORE.values()))
    in_engine = counted(stack.engine.get("/metrics"), tuple(IN_ENGINE.values()))
    return {name: (in_store | in_engine)[metric] for name, metric in (IN_STORE | IN_ENGINE).items()}
