"""TTFT against quality, live: SmolLM2 answers questions about texts whose KV comes from servers, through the waiting
cache. In each round every way answers the same requests: exact chunks under LRU and under the default order, one codec
under the policy, and all of the codecs under it, at several prices of quality.

Only the disk is played: an exact context takes `load_s` from it. A request waits for its context's layers, and its TTFT
is the time from its start to the logits of the first answered token. With arrivals by Poisson it also waits for the
requests before it: that wait is computed from the service times that were measured. The quality of a request is that of
the form in which its context came: the part of the next tokens that stay as they are on exact KV.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.beds.counters import counted
from bench.paper.compression.choice import EXACT
from bench.paper.compression.engine import IN_STORE
from bench.paper.compression.played_disk import PlayedServer, played_server
from bench.paper.compression.texts import asked_texts, smollm2_folder
from descriptors.descriptor import Accept
from nixl_client.client import Client
from nixl_client.connectors.transformers import KvShape, WaitingCache
from objectcache.calibration.form_losses import TextSample
from objectcache.calibration.model_quality import Scored, form_losses, scored, text_sample
from objectcache.calibration.probes import Probe
from objectcache.calibration.quality import States, prefix_states
from objectcache.calibration.real_model import RealModel, load_real_model
from objectcache.calibration.samples import Spread, spread
from objectcache.calibration.shown_quality import shown_qualities
from objectcache.cli.config_compression import DEFAULT_CODECS
from objectcache.kv_codecs.encoding import decode, encode, encode_further
from objectcache.kv_codecs.layer import Codec, goes_on
from storage_server.cache.policies.choice import Eviction
from storage_server.cache.policies.utility import CodecFigures, UtilitySettings
from storage_server.planning.forms import shape_of

CODECS = tuple(DEFAULT_CODECS)
ALL = "all three"
MEMORY_BYTES_PER_S = 1e9
FETCH_S = 60.0
SKEW = 0.9
RESAMPLES = 2000
LOADS = (0.3, 0.6, 0.9)
"""Arrivals by Poisson, as a part of what the way of exact chunks can serve."""
Chain = tuple[Codec, ...]
"""The codecs that a context was encoded with, one after the other; none for exact."""


@dataclass(frozen=True, slots=True)
class LiveCase:
    """DRAM tiers with room for `memory_shares` of the contexts' exact KV, and a disk from which an exact context takes
    `load_s`. `warm_uses` requests for each context come first, then `request_count` in each round. `alphas_s` are what
    quality 1 is worth. After each request nothing is asked for `pause_s`. `known_texts` others say what a codec costs.
    """

    contexts: int
    context_tokens: int
    continuation_tokens: int
    known_texts: int
    memory_shares: Sequence[float]
    load_s: float
    pause_s: float
    warm_uses: int
    request_count: int
    alphas_s: Sequence[float]

    @property
    def way_count(self) -> int:
        """How many ways there are at one size of memory."""
        return 2 + len(self.alphas_s) * (len(CODECS) + 1)

    def requests_of(self, rounds: int) -> int:
        """The requests of one way at one size of memory."""
        return self.warm_uses * self.contexts + rounds * self.request_count


@dataclass(frozen=True, slots=True)
class Way:
    """A configuration of the tier, and the encoded chunks that the reader takes."""

    name: str
    eviction: Eviction = Eviction.REUSE_VALUE
    compression: UtilitySettings | None = None
    accept: Accept | None = None
    alpha_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """One request: seconds to the first token, the context, the form and the error with which it came, and the digest
    of its bytes as they were decoded.
    """

    ttft_s: float
    index: int
    form: str
    error: float
    digest: bytes


class Contexts:
    """Texts with facts in them, their KV, and what each form of it loses. Raises WrongUse without the model."""

    def __init__(self, case: LiveCase) -> None:
        folder = str(smollm2_folder())
        self.real = load_real_model(folder, "cpu")
        answering: Any = load_real_model(folder, "cpu").model
        self.model = answering.to(torch.bfloat16)
        self.shape = KvShape.of(self.model.config, torch.bfloat16, case.context_tokens)
        asked = _probes(self.real, case)
        self.asked, self.known = asked[: case.contexts], asked[case.contexts :]
        states = [prefix_states(self.real.model, torch.tensor([each.context])) for each in self.asked]
        self.stored = [chunk_of(each) for each in states]
        self._exact = [scored(self.real, mine, probe) for mine, probe in zip(states, self.asked, strict=True)]
        self._chains: dict[tuple[int, bytes], Chain] = {}
        self._losses: dict[tuple[int, Chain], TextSample] = {}

    def ask(self, client: Client, index: int, question: int, accept: Accept | None) -> Answered:
        """Ask for one fact: the time to the first token of the answer counts."""
        shape, facts = self.shape, self.asked[index].facts
        buffer = np.empty(shape.layout.delivery_bytes(1), dtype=np.uint8)
        tokens = torch.tensor([facts[question % len(facts)].question])
        began_s = time.perf_counter()
        with torch.inference_mode(), client.fetch([key_of(index)], shape.layout, buffer, accept=accept) as fetch:
            self.model(tokens, past_key_values=WaitingCache(fetch, shape)).logits[0, -1].argmax(-1).item()
            ttft_s = time.perf_counter() - began_s
            forms = fetch.wait(FETCH_S).forms
        form = EXACT if forms is None else forms.runs[0].codec
        error = 0.0 if forms is None else forms.mean_error
        return Answered(ttft_s, index, form, error, digest_of(buffer))

    def loss(self, answered: Answered) -> TextSample:
        """The loss of the context in the form in which it came. Raises AssertionError where other bytes came."""
        index, chain = answered.index, self._chain(answered)
        if (index, chain) not in self._losses:
            probe, exact = self.asked[index], self._exact[index]
            mine: Scored = exact
            if chain:
                mine = scored(self.real, states_of(self._decoded(index, chain), self.shape), probe)
            self._losses[index, chain] = text_sample(mine, exact, probe)
        return self._losses[index, chain]

    def _chain(self, answered: Answered) -> Chain:
        """How the context came to its form, by its bytes: as encoded once, or further from other forms."""
        name = answered.index, answered.digest
        if name not in self._chains:
            for chain in chains_to(Codec(answered.form)):
                self._chains[answered.index, digest_of(self._decoded(answered.index, chain))] = chain
        if name not in self._chains:
            raise AssertionError(f"context {answered.index} came in {answered.form}, and with other bytes")
        return self._chains[name]

    def _decoded(self, index: int, chain: Chain) -> npt.NDArray[np.uint8]:
        """A context behind these codecs."""
        layout = self.shape.kv_layout
        shape = shape_of(layout)
        back = self.stored[index].copy()
        for layer in back.reshape(layout.num_layers, shape.nbytes) if chain else ():
            packed = encode(layer, shape, chain[0])
            for codec in chain[1:]:
                packed, _ = encode_further(packed, shape, codec)
            decode(packed, shape, layer)
        return back


def live(
    case: LiveCase, rounds: int, seed: int, parent: Path, advance: Callable[[int], None]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row for each size of memory and each way, and the qualities that the policy goes by. Raises WrongUse without
    the model.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the other core is the servers', which are in this process
    try:
        return _live(case, rounds, seed, parent, advance)
    finally:
        torch.set_num_threads(threads)


def _live(
    case: LiveCase, rounds: int, seed: int, parent: Path, advance: Callable[[int], None]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    contexts = Contexts(case)
    qualities = known_qualities(contexts.real, contexts.known)
    weights = 1.0 / np.arange(1, case.contexts + 1) ** SKEW
    random = np.random.default_rng(seed)
    drawn = random.choice(case.contexts, case.requests_of(rounds), p=weights / weights.sum())
    order = random.permutation(case.contexts)[drawn].tolist()
    questions = random.integers(0, 1 << 30, len(order)).tolist()
    asked = list(zip(order, questions, strict=True))
    rows: list[dict[str, Any]] = []
    for number, share in enumerate(case.memory_shares):
        folder = parent / str(number)
        folder.mkdir()
        mine = _rounds(contexts, case, share, list(ways(case, contexts.shape, qualities)), asked, folder, advance)
        add_comparisons(mine, seed)
        rows += mine
    return rows, qualities


def _rounds(
    contexts: Contexts, case: LiveCase, share: float, tried: Sequence[Way], asked: Sequence[tuple[int, int]],
    folder: Path, advance: Callable[[int], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of one size of memory. All ways have a server each, and take turns by rounds."""
    nbytes = contexts.shape.layout.chunk_bytes
    warm = case.warm_uses * case.contexts
    blocks = [asked[at : at + case.request_count] for at in range(warm, len(asked), case.request_count)]
    answered: list[list[list[Answered]]] = [[] for _ in tried]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                played_server(
                    folder / str(at), nbytes / case.load_s, round(share * case.contexts * nbytes), way.compression,
                    way.eviction,
                )
            )
            for at, way in enumerate(tried)
        ]  # fmt: skip
        clients = [stack.enter_context(server.client()) for server in servers]
        for at, way in enumerate(tried):
            clients[at].put_chunks([key_of(index) for index in range(case.contexts)], contexts.stored)
            _asked(contexts, clients[at], way, asked[:warm], case.pause_s, advance)
        before = [hits_of(server) for server in servers]
        for number, block in enumerate(blocks):
            for step in range(len(tried)):  # each round begins with another way
                at = (number + step) % len(tried)
                answered[at].append(_asked(contexts, clients[at], tried[at], block, case.pause_s, advance))
        after = [hits_of(server) for server in servers]
    return [row_of(way, share, answered[at], contexts, before[at], after[at]) for at, way in enumerate(tried)]


def _asked(
    contexts: Contexts, client: Client, way: Way, asked: Sequence[tuple[int, int]], pause_s: float,
    advance: Callable[[int], None],
) -> list[Answered]:  # fmt: skip
    found = []
    for index, question in asked:
        found.append(contexts.ask(client, index, question, way.accept))
        time.sleep(pause_s)
        advance(1)
    return found


def ways(case: LiveCase, shape: KvShape, qualities: Mapping[str, float]) -> Iterator[Way]:
    """The ways, those without codecs first."""
    yield Way("LRU, no codecs", Eviction.LRU)
    yield Way("no codecs")
    rate = shape.layout.chunk_bytes / case.load_s
    settings = UtilitySettings(memory_bytes_per_s=MEMORY_BYTES_PER_S, home_bytes_per_s=rate)
    figures = {
        codec: CodecFigures(qualities[codec.value], each.decoded_bytes_per_s) for codec, each in DEFAULT_CODECS.items()
    }
    for alpha_s in case.alphas_s:
        for codecs in (*((codec,) for codec in CODECS), CODECS):
            name = codecs[0].value if len(codecs) == 1 else ALL
            mine = replace(settings, codecs={codec: figures[codec] for codec in codecs}, alpha_s=alpha_s)
            accept = Accept(tuple(codec.value for codec in codecs), "bfloat16")
            yield Way(name, compression=mine, accept=accept, alpha_s=alpha_s)


def known_qualities(real: RealModel, known: Sequence[Probe]) -> dict[str, float]:
    """The quality of each codec on other texts than those that are asked about, as `calibrate quality` writes it: as
    far as the texts show it.
    """
    losses = form_losses(real, known, CODECS, lambda _: None)[1:]
    same = {each.codec: np.array([one.agreement for one in each.samples]) for each in losses}
    return shown_qualities(same, {each.codec: each.bytes_part for each in losses})


def _probes(real: RealModel, case: LiveCase) -> list[Probe]:
    """Those of the contexts, and then those by which qualities are known: every so many texts one of the latter."""
    count = case.contexts + case.known_texts
    found = asked_texts(real.tokenizer, count, case.context_tokens, case.continuation_tokens)
    known = {at * count // case.known_texts for at in range(case.known_texts)}
    return [each for at, each in enumerate(found) if at not in known] + [found[at] for at in sorted(known)]


def chunk_of(states: States) -> npt.NDArray[np.uint8]:
    """The KV of one context as one chunk object: uint8 of L*S bytes, each layer's keys, then its values, by token."""
    layers = [torch.stack([part[0].transpose(0, 1).flatten(1) for part in pair]) for pair in states]
    whole: npt.NDArray[np.uint8] = torch.stack(layers).bfloat16().contiguous().view(torch.uint8).reshape(-1).numpy()
    return whole


def states_of(chunk: npt.NDArray[np.uint8], shape: KvShape) -> States:
    """The KV of a chunk object again, in float32."""
    whole = torch.from_numpy(chunk).view(torch.bfloat16).float()
    parts = whole.reshape(shape.num_layers, 2, shape.chunk_tokens, shape.kv_heads, shape.head_dim).transpose(2, 3)
    return [(layer[0][None], layer[1][None]) for layer in parts]


def chains_to(form: Codec) -> list[Chain]:
    """The ways in which the tier makes a form out of the codecs of this bench, the shortest first."""
    if form is Codec.EXACT:
        return [()]
    before = [chain for codec in CODECS if goes_on(codec, form) for chain in chains_to(codec)]
    return sorted([(form,), *((*chain, form) for chain in before)], key=len)


def digest_of(data: npt.NDArray[np.uint8]) -> bytes:
    """The name of these bytes."""
    return hashlib.sha256(data.data).digest()


def key_of(index: int) -> str:
    """The name of a context's chunk."""
    return f"runs/context-{index}"


def hits_of(server: PlayedServer) -> Mapping[str, float]:
    """Counts since the server's start."""
    found = counted(server.metrics(), tuple(IN_STORE.values()))
    return {name: found[metric] for name, metric in IN_STORE.items()}


def row_of(
    way: Way, share: float, rounds: Sequence[Sequence[Answered]], contexts: Contexts, before: Mapping[str, float],
    after: Mapping[str, float],
) -> dict[str, Any]:  # fmt: skip
    """The figures of one way; each round is a sample."""
    answered = [each for block in rounds for each in block]
    ttft_s = [[each.ttft_s for each in block] for block in rounds]
    losses = [[contexts.loss(each) for each in block] for block in rounds]
    lost = [each for block in losses for each in block]
    hits, misses = (after[name] - before[name] for name in ("hits", "misses"))
    return {
        "memory_share": share, "way": way.name, "alpha_s": way.alpha_s,
        "ttft_s": spread([float(np.mean(block)) for block in ttft_s]),
        "ttft_p50_s": spread([float(np.percentile(block, 50)) for block in ttft_s]),
        "ttft_p90_s": spread([float(np.percentile(block, 90)) for block in ttft_s]),
        "same": spread([float(np.mean([each.agreement for each in block])) for block in losses]),
        "kl": float(np.mean([each.kl for each in lost])), "kl_max": max(each.kl for each in lost),
        "facts_right": float(np.mean([each.recall_right for each in lost])),
        "dram_hit_rate": hits / max(1.0, hits + misses),
        "forms": dict(sorted(Counter(each.form for each in answered).items())),
        "mean_error": float(np.mean([each.error for each in answered])),
        "service_s": [each.ttft_s for each in answered], "qualities": [each.agreement for each in lost],
    }  # fmt: skip


def add_comparisons(rows: Sequence[dict[str, Any]], seed: int) -> None:
    """The TTFT of each way with arrivals; and for all codecs together, the codec alone that is worth most under the
    same policy at the same price of quality, chosen afterwards. The rows are those of one size of memory.
    """
    exact = next(row for row in rows if row["way"] == "no codecs")
    capacity_per_s = 1.0 / float(np.mean(exact["service_s"]))
    for row in rows:
        service_s = row["service_s"]
        row["quality"], row["mean_ttft_s"] = float(np.mean(row["qualities"])), float(np.mean(service_s))
        row["ttft_with_arrivals"] = [
            {"load": load, "rate_per_s": load * capacity_per_s,
             "ttft_s": float(np.mean(waited(service_s, load * capacity_per_s, seed)))}
            for load in LOADS
        ]  # fmt: skip
    for row in rows:
        if row["way"] != ALL:
            continue
        alpha_s = row["alpha_s"]
        singles = [each for each in rows if each["alpha_s"] == alpha_s and each is not row]
        best = max(singles, key=lambda each: utility_s(each, alpha_s))
        row |= {
            "best_single": best["way"], "single_quality": best["quality"], "single_ttft_s": best["mean_ttft_s"],
            "gain_s": gain_s(row, best, alpha_s, seed),
            "gain_over_exact_s": gain_s(row, exact, alpha_s, seed),
            "exact_over_ttft": exact["mean_ttft_s"] / row["mean_ttft_s"],
        }  # fmt: skip


def gain_s(mine: Mapping[str, Any], other: Mapping[str, Any], alpha_s: float, seed: int) -> Spread:
    """The utility of a way over that of another one with the same requests, and its interval of 95 %, the requests
    drawn anew.
    """
    qualities = np.array(mine["qualities"]) - np.array(other["qualities"])
    gains = alpha_s * qualities - (np.array(mine["service_s"]) - np.array(other["service_s"]))
    drawn = np.random.default_rng(seed).integers(0, len(gains), (RESAMPLES, len(gains)))
    low, high = np.percentile(gains[drawn].mean(axis=1), (2.5, 97.5))
    return Spread(float(gains.mean()), float(low), float(high))


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
