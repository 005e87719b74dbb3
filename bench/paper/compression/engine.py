"""End to end: vLLM with SmolLM2 answers questions about stored texts, with a store whose DRAM tier compresses, and with
one whose tier does not.

Each text is stored once. Then questions come, about texts that are drawn by Zipf's law; the engine's own blocks are
forgotten before each, so that the text's KV is loaded. Both stores have the same memory and the same link.
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
from transformers import AutoConfig, AutoTokenizer

from bench.beds.counters import counted, page_of
from bench.beds.ours import Servers, target_of
from bench.beds.processes import BaselineError
from bench.beds.vllm_requests import StreamAnswer, StreamRequest, ask
from bench.beds.vllm_servers import VllmServer, vllm_servers
from bench.paper.compression.texts import asked_texts, smollm2_folder
from objectcache.calibration.probes import AskedFact, Probe
from objectcache.calibration.samples import progress_bar, spread
from objectcache.calibration.servers import LocalServer

WAYS = ("off", "adaptive")
SKEW = 0.9
REQUEST_S = 60.0
SALT = "compression"
ELEMENT_BYTES = 2
CHUNK_TOKENS = 256
ROOM_TOKENS = 256
"""Tokens of an engine's prompts behind a text."""
ALPHA_S = 0.25
HOME_OVER_LINK = 0.5
"""The tier is told that its home delivers at half the rate of the link."""
IN_STORE = {"hits": "objectcache_dram_hit_extents_total", "misses": "objectcache_dram_missed_extents_total"}
IN_ENGINE = {
    "loaded": "vllm:objectcache_loaded_chunks_total", "lossy": "vllm:objectcache_lossy_chunks_total",
    "error": "vllm:objectcache_lossy_error_total",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineCase:
    """`texts` of so many tokens, a DRAM tier with room for `memory_share` of their exact KV, and a link on which the
    exact KV of one takes `load_s`.
    """

    texts: int
    text_tokens: int
    memory_share: float
    load_s: float


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about a text, its right answer, and what the engine said."""

    right: str
    answer: StreamAnswer


Taken = dict[str, list[Asked]]
"""For each way: the questions, and what was answered."""


class Model:
    """SmolLM2 as vLLM reads it, and its tokenizer. Raises WrongUse without it."""

    def __init__(self) -> None:
        self.folder = smollm2_folder()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder)
        self._config: Any = AutoConfig.from_pretrained(self.folder)

    def kv_bytes(self, tokens: int) -> int:
        """The exact KV of so many tokens in bfloat16."""
        config = self._config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * tokens * ELEMENT_BYTES)

    def right(self, fact: AskedFact) -> str:
        """The right answer to a question."""
        return str(self.tokenizer.decode(fact.answer))


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
def stacks(model: Model, case: EngineCase, parent: Path | None) -> Iterator[dict[str, Stack]]:
    """One for each way, over http. Raises BaselineError, LocalServerError."""
    nbytes = model.kv_bytes(case.text_tokens)
    dram_bytes = round(case.texts * nbytes * case.memory_share)
    with ExitStack() as stack:
        servers = Servers(stack, parent, "compression")
        found = {}
        for way in WAYS:
            store = servers.serve(configuration(way, nbytes / case.load_s), "--dram-bytes", str(dram_bytes))
            folder = servers.folder / way
            folder.mkdir()
            extra = {
                "load": "all", "lossy": way, "transport": "http", "lease_s": 0.0,
                "chunk_tokens": min(CHUNK_TOKENS, case.text_tokens),
            }  # fmt: skip
            running = vllm_servers(
                folder, model.folder, 1, target_of(store), "--dtype", "bfloat16",
                "--max-model-len", str(case.text_tokens + ROOM_TOKENS), extra=extra,
            )  # fmt: skip
            found[way] = Stack(stack.enter_context(running)[0], store)
        yield found


def end_to_end(case: EngineCase, request_count: int, runs: int, seed: int, parent: Path | None) -> dict[str, Any]:
    """Both ways, asked in turn. Raises WrongUse without the model, and BaselineError where a text was not loaded."""
    model = Model()
    known = asked_texts(model.tokenizer, case.texts, case.text_tokens, 0)
    turns = len(WAYS) * (case.texts + request_count * (runs + 1))
    with stacks(model, case, parent) as running, progress_bar(turns, "engine") as step:

        async def turn(numbers: Sequence[int], random: np.random.Generator) -> Taken:
            taken: Taken = {way: [] for way in WAYS}
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as http:
                for at, number in enumerate(numbers):
                    probe = known[number]
                    fact = probe.facts[int(random.integers(len(probe.facts)))]
                    for way in WAYS if at % 2 == 0 else WAYS[::-1]:
                        engine = running[way].engine
                        await asyncio.to_thread(engine.forget)
                        answer = await ask(http, engine.url, _request(probe, fact), SALT)
                        taken[way].append(Asked(model.right(fact), answer))
                        step(1)
            return taken

        asyncio.run(turn(range(case.texts), np.random.default_rng(seed)))  # each is computed, and stored
        weights = 1.0 / np.arange(1, case.texts + 1) ** SKEW
        rounds: list[tuple[Taken, Mapping[str, Mapping[str, float]]]] = []
        for round_index in range(runs + 1):
            random = np.random.default_rng((seed, round_index))
            numbers = random.choice(case.texts, request_count, p=weights / weights.sum()).tolist()
            before = {way: _counted(each) for way, each in running.items()}
            taken = asyncio.run(turn(numbers, random))
            after = {way: _counted(each) for way, each in running.items()}
            late = [each.answer.cached_tokens for way in WAYS for each in taken[way]]
            late = [tokens for tokens in late if tokens < case.text_tokens]
            if late and round_index:
                raise BaselineError(f"{len(late)} texts were not loaded whole: {late[:5]} of {case.text_tokens} tokens")
            if round_index:  # the first one fills both memories
                counted = {way: {name: after[way][name] - before[way][name] for name in before[way]} for way in WAYS}
                rounds.append((taken, counted))
    return figures(rounds)


def _request(probe: Probe, fact: AskedFact) -> StreamRequest:
    return StreamRequest(0.0, (*probe.context, *fact.question), len(fact.answer))


def figures(rounds: Sequence[tuple[Taken, Mapping[str, Mapping[str, float]]]]) -> dict[str, Any]:
    """Compare the times and the answers of the ways, also by pairs; each round is a sample. Pure."""
    ways: dict[str, Any] = {}
    for way in WAYS:
        of_way = [taken[way] for taken, _ in rounds]
        counts = [counted[way] for _, counted in rounds]
        ttfts = [[each.answer.ttft_s for each in block] for block in of_way]
        ways[way] = {
            "ttft_p50_s": [float(np.percentile(each, 50)) for each in ttfts],
            "ttft_p90_s": [float(np.percentile(each, 90)) for each in ttfts],
            "dram_hit_rate": [each["hits"] / max(1.0, each["hits"] + each["misses"]) for each in counts],
            "lossy_share": [each["lossy"] / max(1.0, each["loaded"]) for each in counts],
            "mean_error": [each["error"] / max(1.0, each["loaded"]) for each in counts],
            "right": [_same_share((each.right, each.answer.text) for each in block) for block in of_way],
        }
    agreement, pair_over = [], []
    for taken, _ in rounds:
        both = list(zip(taken["off"], taken["adaptive"], strict=True))
        agreement.append(_same_share((exact.answer.text, lossy.answer.text) for exact, lossy in both))
        pair_over.append(float(np.median([exact.answer.ttft_s / lossy.answer.ttft_s for exact, lossy in both])))
    found: dict[str, Any] = {"ways": ways, "agreement": spread(agreement), "ttft_pair_over": spread(pair_over)}
    for name in ("ttft_p50_s", "ttft_p90_s"):
        pairs = zip(ways["off"][name], ways["adaptive"][name], strict=True)
        found[name.replace("_s", "_over")] = spread([off / adaptive for off, adaptive in pairs])
    for mine in ways.values():
        for name in tuple(mine):
            mine[f"{name}_spread"] = spread(mine[name])
    return found


def _same_share(answers: Iterable[tuple[str, str]]) -> float:
    """The part of the answers that are the wanted ones, but for spaces around them."""
    same = [wanted.strip() == got.strip() for wanted, got in answers]
    return sum(same) / len(same)


def _counted(stack: Stack) -> Mapping[str, float]:
    """Counts of the store and of the engine since they started."""
    in_store = counted(page_of(stack.store), tuple(IN_STORE.values()))
    in_engine = counted(stack.engine.get("/metrics"), tuple(IN_ENGINE.values()))
    return {name: (in_store | in_engine)[metric] for name, metric in (IN_STORE | IN_ENGINE).items()}
