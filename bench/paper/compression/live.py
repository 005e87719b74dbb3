"""TTFT against quality, live: the trained model answers questions behind whole contexts that come from a server,
through the waiting cache. One way after the other, with the same requests: exact chunks only, one codec for everything,
and the policy with several prices of quality.

Only the disk is played: an exact context takes `load_s` from it. A request waits for its context's layers, and its TTFT
is the time from its start to the logits of the first answered token. With arrivals by Poisson it also waits for the
requests before it: that wait is computed from the service times that were measured.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaForCausalLM

from bench.beds.counters import counted
from bench.core.experiment import WrongUse
from bench.paper.compression.choice import EXACT, Qualities
from bench.paper.compression.engine import IN_STORE, SKEW, Asked, EngineCase, contexts
from bench.paper.compression.played_disk import PlayedServer, played_server
from bench.paper.compression.quality import measured
from bench.paper.compression.tasks import Task
from bench.paper.compression.train import load_model
from descriptors.descriptor import Accept
from descriptors.notices import Mode
from nixl_client.client import Client
from nixl_client.connectors.transformers import KvShape, WaitingCache, chunks_from_cache
from nixl_client.fetch.layer_fetch import Layer
from nixl_client.lossy import Lossy
from objectcache.calibration.samples import Spread, spread
from objectcache.calibration.shown_quality import shown_qualities
from objectcache.kv_codecs.dropping import Kept
from objectcache.kv_codecs.elements import Element
from objectcache.kv_codecs.encoding import encode, encode_further
from objectcache.kv_codecs.layer import DROPPING, Codec, LayerShape, goes_on
from objectcache.kv_codecs.slots import decode_packed
from storage_server.cache.policies.utility import CodecFigures, UtilitySettings

FIXED = (Codec.KIVI8, Codec.KIVI4, Codec.KIVI2, Codec.STREAMING50, Codec.KEYDIFF50)
"""One codec for everything."""
MEMORY_BYTES_PER_S, DECODED_BYTES_PER_S = 1e9, 2e9
FETCH_S = 60.0
RESAMPLES = 2000
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


Chain = tuple[Codec, ...]
"""The codecs that a context was encoded with, one after the other; none for exact."""


def chains_to(form: Codec) -> list[Chain]:
    """The ways in which the tier makes a form, the shortest first."""
    if form is Codec.EXACT:
        return [()]
    before = [
        chain for codec in Codec if codec is not Codec.EXACT and goes_on(codec, form) for chain in chains_to(codec)
    ]
    return sorted([(form,), *((*chain, form) for chain in before)], key=len)


@dataclass(frozen=True, slots=True)
class Answered:
    """One request: seconds to the first token, the context, the form and the error with which it came, and its bytes
    as they were decoded.
    """

    ttft_s: float
    index: int
    form: str
    error: float
    data: npt.NDArray[np.uint8]


def live(
    model_name: str, case: LiveCase, runs: int, seed: int, parent: Path, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    """A row for each way. Raises WrongUse where the contexts are too short for a codec."""
    if case.context_tokens < 128:
        raise WrongUse("contexts of 128 tokens at least, since shorter ones are not encoded by every codec")
    model = load_model(model_name).bfloat16()
    shape = KvShape.of(model.config, torch.bfloat16, case.context_tokens)
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
    reader = Reader(model, shape, stored, asked, case.context_tokens)
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
                answered.append(reader.ask(client, index, question % len(asked[index]), way.accept))
                time.sleep(case.pause_s)
                advance(1)
            after = hits_of(server)
        rows.append(row_of(way, answered, [reader.right(each) for each in answered], runs, before, after))
    add_comparisons(rows, seed)
    return rows


def ways(case: LiveCase, shape: KvShape, known: Qualities) -> Iterator[Way]:
    """The ways, exact chunks first."""
    yield Way(EXACT, None, None)
    settings = UtilitySettings(
        memory_bytes_per_s=MEMORY_BYTES_PER_S,
        home_bytes_per_s=shape.layout.chunk_bytes / case.load_s,
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
    """The quality of each codec on each task, on other samples than those that are asked for, as `calibrate quality`
    writes it: as far as the samples show it.
    """
    rows = measured((model_name,), case.quality_contexts, case.context_tokens, case.questions, seed, lambda _: None)
    found: dict[str, dict[str, float]] = {}
    for task in Task:
        mine = {row["form"]: row for row in rows if row["task"] == task.value}
        exact = max(1e-9, float(np.mean(mine.pop(EXACT)["rights"])))
        scores = {form: np.array(row["rights"]) for form, row in mine.items()}
        shown = shown_qualities(scores, {form: row["bytes"] for form, row in mine.items()})
        found[task.value] = {EXACT: 1.0, **{form: min(1.0, quality / exact) for form, quality in shown.items()}}
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


def fetched(client: Client, shape: KvShape, index: int, accept: Accept | None) -> None:
    """Use a context without asking about it."""
    buffer = np.empty(shape.layout.delivery_bytes(1), dtype=np.uint8)
    with client.fetch([key_of(index)], shape.layout, buffer, accept=accept) as fetch:
        fetch.wait(FETCH_S)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A context of so many tokens in one form, as a fetch brings it: `layers` are uint8 of shape (1, S) each, `kept`
    says which tokens of each layer are there, None for all.
    """

    tokens: int
    layers: Sequence[Any]
    kept: Sequence[Kept | None]

    @property
    def kept_tokens(self) -> int:
        """How many tokens are there in each layer."""
        first = self.kept[0]
        return int(first.sum()) if first is not None else self.tokens

    def wait_admitted(self, timeout_s: float | None = None) -> tuple[Mode, int]:
        """One chunk."""
        return Mode.LAYER_MAJOR, 1

    def wait_layer(self, layer_index: int, timeout_s: float | None = None) -> Layer:
        """It is there."""
        return Layer(layer_index, 1, self.layers[layer_index], 0.0, self.kept[layer_index])


class Reader:
    """Asks about contexts. When all have been asked, what came is compared with what the codec makes here of the exact
    chunk, or of the forms before, and the right tokens are counted on that.
    """

    def __init__(
        self, model: LlamaForCausalLM, shape: KvShape, stored: Sequence[Any], asked: Sequence[Sequence[Asked]],
        context_tokens: int,
    ) -> None:  # fmt: skip
        self._model = model
        self._shape = shape
        self._stored = stored
        self._asked = asked
        self._context_tokens = context_tokens
        self._decoded: dict[tuple[int, Chain], Decoded] = {}
        self._packed: dict[tuple[int, Chain], list[bytes]] = {}
        self._rights: dict[tuple[int, Chain], float] = {}

    def ask(self, client: Client, index: int, question: int, accept: Accept | None) -> Answered:
        """Ask one question: the time to its first token counts."""
        shape = self._shape
        buffer = np.empty(shape.layout.delivery_bytes(1), dtype=np.uint8)
        tokens = torch.tensor([self._asked[index][question].prompt[self._context_tokens :]])
        began_s = time.perf_counter()
        with torch.inference_mode(), client.fetch([key_of(index)], shape.layout, buffer, accept=accept) as fetch:
            self._model(tokens, past_key_values=WaitingCache(fetch, shape)).logits[0, -1].argmax(-1).item()
            ttft_s = time.perf_counter() - began_s
            forms = fetch.wait(FETCH_S).forms
        form = EXACT if forms is None else forms.runs[0].codec
        return Answered(ttft_s, index, form, 0.0 if forms is None else forms.mean_error, buffer)

    def _chain(self, answered: Answered) -> Chain:
        """How the context came to its form, by its bytes: as encoded once, or further from other forms. Raises
        AssertionError where they are of no such way.
        """
        for chain in chains_to(Codec(answered.form)):
            made = self._form(answered.index, chain).layers
            if np.array_equal(answered.data, np.concatenate([layer[0] for layer in made])):
                return chain
        raise AssertionError(f"context {answered.index} came in {answered.form}, and with other bytes")

    def right(self, answered: Answered) -> float:
        """The part of right tokens over all questions about the context as it came, each asked for behind the right
        ones before it. Raises AssertionError where other bytes came.
        """
        index, chain = answered.index, self._chain(answered)
        if (index, chain) not in self._rights:
            right = count = 0
            for asked in self._asked[index]:
                tokens = torch.tensor([[*asked.prompt[self._context_tokens :], *asked.answer[:-1]]])
                with torch.inference_mode():
                    cache = WaitingCache(self._form(index, chain), self._shape)
                    logits = self._model(tokens, past_key_values=cache).logits[0]
                found = logits[-len(asked.answer) :].argmax(-1).tolist()
                right += sum(one == other for one, other in zip(found, asked.answer, strict=True))
                count += len(asked.answer)
            self._rights[index, chain] = right / count
        return self._rights[index, chain]

    def _form(self, index: int, chain: Chain) -> Decoded:
        if (index, chain) not in self._decoded:
            layout = self._shape.kv_layout
            shape = LayerShape(layout.tokens, layout.width, Element.BFLOAT16)
            if not chain:
                layers = list(self._stored[index].reshape(layout.num_layers, 1, shape.nbytes))
                self._decoded[index, chain] = Decoded(layout.tokens, layers, [None] * layout.num_layers)
                return self._decoded[index, chain]
            before = self._form(index, chain[:-1])
            packed = self._packed[index, chain] = [
                encode_further(self._packed[index, chain[:-1]][at], shape, chain[-1])[0]
                if len(chain) > 1
                else encode(layer[0], shape, chain[-1])
                for at, layer in enumerate(before.layers)
            ]
            layers, kept = [], []
            for part in packed:
                data = np.frombuffer(part, dtype=np.uint8)
                out = np.empty(shape.nbytes, dtype=np.uint8)
                kept.append(decode_packed(data, [(chain[-1].value, 1, len(data))], shape, out))
                layers.append(out[None])
            self._decoded[index, chain] = Decoded(layout.tokens, layers, kept)
        return self._decoded[index, chain]


def hits_of(server: PlayedServer) -> Mapping[str, float]:
    """Counts since the server's start."""
    found = counted(server.metrics(), tuple(IN_STORE.values()))
    return {name: found[metric] for name, metric in IN_STORE.items()}


def row_of(
    way: Way, answered: Sequence[Answered], rights: Sequence[float], runs: int, before: Mapping[str, float],
    after: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    """The figures of one way; each block of requests is a sample."""
    blocks = np.array_split(np.arange(len(answered)), runs)
    ttft, right = np.array([each.ttft_s for each in answered]), np.array(rights)
    hits, misses = (after[name] - before[name] for name in ("hits", "misses"))
    return {
        "way": way.name, "alpha_s": way.alpha_s,
        "ttft_s": spread([float(ttft[block].mean()) for block in blocks]),
        "ttft_p50_s": spread([float(np.percentile(ttft[block], 50)) for block in blocks]),
        "ttft_p90_s": spread([float(np.percentile(ttft[block], 90)) for block in blocks]),
        "right": spread([float(right[block].mean()) for block in blocks]),
        "dram_hit_rate": hits / max(1.0, hits + misses),
        "encoded_share": float(np.mean([each.form != EXACT for each in answered])),
        "forms": dict(sorted(Counter(each.form for each in answered).items())),
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
        service_s, rights = row["service_s"], row["rights"]
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
            "gain_s": gain_s(row, best, rows[0], row["alpha_s"], seed),
            "ttft_over": best["mean_ttft_s"] / row["mean_ttft_s"],
        }  # fmt: skip


def gain_s(
    mine: Mapping[str, Any], other: Mapping[str, Any], exact: Mapping[str, Any], alpha_s: float, seed: int
) -> Spread:
    """The utility of a way over that of another one with the same requests, and its interval of 95 %, the requests
    drawn anew.
    """
    rights = {name: np.array(row["rights"]) for name, row in (("mine", mine), ("other", other), ("exact", exact))}
    waits_s = np.array(mine["service_s"]) - np.array(other["service_s"])
    drawn = np.random.default_rng(seed).integers(0, len(waits_s), (RESAMPLES, len(waits_s)))
    quality = (rights["mine"] - rights["other"])[drawn].mean(axis=1) / np.maximum(
        1e-9, rights["exact"][drawn].mean(axis=1)
    )
    low, high = np.percentile(alpha_s * quality - waits_s[drawn].mean(axis=1), (2.5, 97.5))
    return Spread(utility_s(mine, alpha_s) - utility_s(other, alpha_s), float(low), float(high))


def utility_s(row: Mapping[str, Any], alpha_s: float) -> float:
    """The worth of a way at a price of quality: alpha * quality - TTFT."""
    return alpha_s * float(row["quality"]) - float(row["mean_ttft_s"])


def waited(service_s: Sequence[float], rate_per_s: float, seed: int) -> list[float]:
    """The time from each arrival to its first token, where one request after the other is served. Pure."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate_per_s, len(service_s))
    free_s, found = 0.0, []
    for at_s, took_s in zip(np.cumsum(gaps).tolist(), service_s, strict=True):
        free_s = max(free_s, at_s) + took_s
        found.append(free_s - at_s)
    return found
