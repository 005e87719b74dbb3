"""TTFT against quality, live: the trained model answers questions behind whole contexts that come from a server,
through the waiting cache. One way after the other, with the same requests: exact chunks only, one codec for everything,
and the policy with several prices of quality.

Only the disk is played: an exact context takes `load_s` from it. A request waits for its context's layers, and its TTFT
is the time from its start to the logits of the first answered token. With arrivals by Poisson it also waits for the
requests before it: that wait is computed from the service times that were measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from bench.beds.counters import counted
from bench.beds.played_disk import PlayedServer, played_server
from bench.core.experiment import WrongUse
from bench.experiments.compression.choice import EXACT, Qualities
from bench.experiments.compression.engine import IN_STORE, SKEW, Asked, EngineCase, contexts
from bench.experiments.compression.quality import measured
from bench.experiments.compression.tasks import Task
from bench.experiments.compression.train import load_model
from calibration.samples import spread
from descriptors.descriptor import Accept
from kv_codecs.layer import DROPPING, Codec
from nixl_client.client import ObjectCacheClient
from nixl_client.connectors.transformers import KvShape, WaitingCache, chunks_from_cache
from nixl_client.lossy import Lossy
from storage_server.compression.policy import CodecFigures, UtilitySettings

FIXED = (Codec.KIVI8, Codec.KIVI4, Codec.KIVI2, Codec.STREAMING50, Codec.KEYDIFF50)
"""One codec for everything."""
MEMORY_BYTES_PER_S, DECODED_BYTES_PER_S = 1e9, 2e9
FETCH_S = 60.0
LOADS = (0.3, 0.6, 0.9)
"""Arrivals by Poisson, as a part of what the way of exact chunks can serve."""


@dataclass(frozen=True, slots=True)
class LiveCase:
    """A DRAM tier with room for `memory_share` of the contexts' exact KV, and a disk from which an exact context takes
    `load_s`. `warm_uses` requests for each context come first, then `request_count` in each of `runs` blocks.
    `alphas_s` are what quality 1 is worth. Between two requests nothing is asked for `pause_s`.
    """

    contexts: int
    context_tokens: int
    questions: int
    memory_share: float
    load_s: float
    pause_s: float
    warm_uses: int
    request_count: int
    alphas_s: Sequence[float]
    quality_contexts: int


@dataclass(frozen=True, slots=True)
class Way:
    """A configuration of the tier, and the encoded chunks that the reader takes."""

    name: str
    compression: UtilitySettings | None
    accept: Accept | None
    alpha_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """One request: seconds to the first token, and of its tokens the part that is right; and the chunk's error."""

    ttft_s: float
    right: float
    error: float
    is_encoded: bool


def live(
    model_name: str, case: LiveCase, runs: int, seed: int, parent: Path, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    """A row for each way. Raises WrongUse where the contexts are too short for a codec."""
    if case.context_tokens < 128:
        raise WrongUse("contexts of 128 tokens at least, since shorter ones are not encoded by every codec")
    model = load_model(model_name)
    shape = KvShape.of(model.config, torch.float32, case.context_tokens)
    engine_case = EngineCase(case.contexts, case.context_tokens, case.questions, case.memory_share, case.load_s)
    asked = contexts(engine_case, seed)
    stored = [context_chunk(model, each[0].prompt[: case.context_tokens]) for each in asked]
    known = known_qualities(model_name, case, seed + 1)
    weights = 1.0 / np.arange(1, case.contexts + 1) ** SKEW
    random = np.random.default_rng(seed)
    order = random.permutation(case.contexts)  # so that no task has all contexts that are used often
    warm = order[random.choice(case.contexts, case.warm_uses * case.contexts, p=weights / weights.sum())].tolist()
    scored = order[random.choice(case.contexts, runs * case.request_count, p=weights / weights.sum())].tolist()
    questions = random.integers(0, 1 << 30, len(scored)).tolist()
    rows = []
    for number, way in enumerate(ways(case, shape, known)):
        folder = parent / str(number)
        folder.mkdir()
        nbytes = shape.layout.chunk_bytes
        dram_bytes = round(case.memory_share * case.contexts * nbytes)
        running = played_server(folder, nbytes / case.load_s, dram_bytes, way.compression)
        with running as server, server.client() as client:
            for index, chunk in enumerate(stored):
                name = list(Task)[index % len(Task)].value
                client.put_chunks([key_of(index)], [chunk], content_class=name)
            for index in warm:
                fetched(client, shape, index, way.accept)
                time.sleep(case.pause_s)
                advance(1)
            before = hits_of(server)
            answered = []
            for index, question in zip(scored, questions, strict=True):
                each = asked[index][question % len(asked[index])]
                answered.append(answer(model, client, shape, index, each, case.context_tokens, way.accept))
                time.sleep(case.pause_s)
                advance(1)
            rows.append(row_of(way, answered, runs, before, hits_of(server)))
    add_comparisons(rows, seed)
    return rows


def ways(case: LiveCase, shape: KvShape, known: Qualities) -> Iterator[Way]:
    """The ways, exact chunks first."""
    yield Way(EXACT, None, None)
    settings = UtilitySettings(
        memory_bytes_per_s=MEMORY_BYTES_PER_S,
        home_bytes_per_s=shape.layout.chunk_bytes / case.load_s,
        half_life_s=case.warm_uses * case.contexts * (case.load_s + case.pause_s),
    )
    element = str(shape.dtype).removeprefix("torch.")
    for codec in FIXED:
        only = {codec: CodecFigures(1.0, DECODED_BYTES_PER_S)}
        yield Way(codec.value, replace(settings, codecs=only), Accept((codec.value,), element))
    accept = shape.accept(Lossy.ADAPTIVE, dropping=DROPPING)
    assert accept is not None
    codecs = {Codec(name): CodecFigures(1.0, DECODED_BYTES_PER_S) for name in accept.codecs}
    classes = {
        task: {Codec(name): quality for name, quality in each.items() if name != EXACT} for task, each in known.items()
    }
    for alpha_s in case.alphas_s:
        mine = replace(settings, codecs=codecs, class_qualities=classes, alpha_s=alpha_s)
        yield Way(f"ours, alpha {alpha_s:g} s", mine, accept, alpha_s)


def known_qualities(model_name: str, case: LiveCase, seed: int) -> Qualities:
    """The quality of each codec on each task, on other samples than those that are asked for."""
    rows = measured((model_name,), case.quality_contexts, case.context_tokens, case.questions, seed, lambda _: None)
    exact = {row["task"]: row["accuracy"] for row in rows if row["form"] == EXACT}
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["task"], {})[row["form"]] = min(1.0, row["accuracy"] / max(1e-9, exact[row["task"]]))
    return found


def context_chunk(model: LlamaForCausalLM, context: Sequence[int]) -> Any:
    """The KV of a whole context as one chunk object."""
    with torch.inference_mode():
        cache = model(torch.tensor([context]), use_cache=True).past_key_values
    assert cache is not None
    return chunks_from_cache(cache, len(context))[0]


def key_of(index: int) -> str:
    """The name of a context's chunk."""
    return f"runs/context-{index}"


def fetched(client: ObjectCacheClient, shape: KvShape, index: int, accept: Accept | None) -> None:
    """Use a context without asking about it."""
    buffer = np.empty(shape.layout.delivery_bytes(1), dtype=np.uint8)
    with client.fetch([key_of(index)], shape.layout, buffer, accept=accept) as fetch:
        fetch.wait(FETCH_S)


def answer(
    model: LlamaForCausalLM, client: ObjectCacheClient, shape: KvShape, index: int, asked: Asked, context_tokens: int,
    accept: Accept | None,
) -> Answered:  # fmt: skip
    """Ask one question. Each token of the answer is asked for behind the right ones before it."""
    buffer = np.empty(shape.layout.delivery_bytes(1), dtype=np.uint8)
    question = torch.tensor([asked.prompt[context_tokens:]])
    began_s = time.perf_counter()
    with torch.inference_mode(), client.fetch([key_of(index)], shape.layout, buffer, accept=accept) as fetch:
        cache = WaitingCache(fetch, shape)
        first = model(question, past_key_values=cache).logits[0, -1:].argmax(-1)
        ttft_s = time.perf_counter() - began_s
        forms = fetch.wait(FETCH_S).forms
        found = first.tolist()
        if len(asked.answer) > 1:
            rest = model(torch.tensor([asked.answer[:-1]]), past_key_values=cache).logits[0].argmax(-1)
            found += rest.tolist()
    right = sum(one == other for one, other in zip(found, asked.answer, strict=True)) / len(asked.answer)
    encoded = forms is not None and not forms.is_exact
    return Answered(ttft_s, right, forms.mean_error if forms is not None else 0.0, encoded)


def hits_of(server: PlayedServer) -> Mapping[str, float]:
    """Counts since the server's start."""
    found = counted(server.metrics(), tuple(IN_STORE.values()))
    return {name: found[metric] for name, metric in IN_STORE.items()}


def row_of(
    way: Way, answered: Sequence[Answered], runs: int, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, Any]:
    """The figures of one way; each block of requests is a sample."""
    blocks = np.array_split(np.arange(len(answered)), runs)
    ttft, right = np.array([each.ttft_s for each in answered]), np.array([each.right for each in answered])
    hits, misses = (after[name] - before[name] for name in ("hits", "misses"))
    return {
        "way": way.name, "alpha_s": way.alpha_s,
        "ttft_s": spread([float(ttft[block].mean()) for block in blocks]),
        "ttft_p50_s": spread([float(np.percentile(ttft[block], 50)) for block in blocks]),
        "ttft_p90_s": spread([float(np.percentile(ttft[block], 90)) for block in blocks]),
        "right": spread([float(right[block].mean()) for block in blocks]),
        "dram_hit_rate": hits / max(1.0, hits + misses),
        "encoded_share": float(np.mean([each.is_encoded for each in answered])),
        "mean_error": float(np.mean([each.error for each in answered])),
        "service_s": ttft.tolist(), "rights": right.tolist(),
    }  # fmt: skip


def add_comparisons(rows: Sequence[dict[str, Any]], seed: int) -> None:
    """The quality of each way, as the part of right tokens over that of exact chunks; the TTFT with arrivals; and for
    ours, the way of one codec that is worth most at the same price of quality.
    """
    exact_right = float(np.mean(rows[0]["rights"]))
    capacity_per_s = 1.0 / float(np.mean(rows[0]["service_s"]))
    for row in rows:
        service_s, rights = row.pop("service_s"), row.pop("rights")
        row["quality"] = float(np.mean(rights)) / max(1e-9, exact_right)
        row["mean_ttft_s"] = float(np.mean(service_s))
        row["ttft_with_arrivals"] = [
            {"load": load, "rate_per_s": load * capacity_per_s,
             "ttft_s": float(np.mean(waited(service_s, load * capacity_per_s, seed)))}
            for load in LOADS
        ]  # fmt: skip
    fixed = [row for row in rows if row["alpha_s"] is None]
    for row in rows:
        if row["alpha_s"] is None:
            continue
        best = max(fixed, key=lambda each: utility_s(each, row["alpha_s"]))
        row |= {
            "best_fixed": best["way"], "fixed_quality": best["quality"],
            "fixed_utility_s": utility_s(best, row["alpha_s"]),
            "gain_s": utility_s(row, row["alpha_s"]) - utility_s(best, row["alpha_s"]),
            "ttft_over": best["mean_ttft_s"] / row["mean_ttft_s"],
        }  # fmt: skip


def utility_s(row: Mapping[str, Any], alpha_s: float) -> float:
    """What a way is worth at a price of quality: alpha * quality - TTFT."""
    return alpha_s * float(row["quality"]) - float(row["mean_ttft_s"])


def waited(service_s: Sequence[float], rate_per_s: float, seed: int) -> list[float]:
    """The time from each arrival to its first token, where one request after the other is served. Pure."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate_per_s, len(service_s))
    free_s, found = 0.0, []
    for at_s, took_s in zip(np.cumsum(gaps).tolist(), service_s, strict=True):
        free_s = max(free_s, at_s) + took_s
        found.append(free_s - at_s)
    return found
