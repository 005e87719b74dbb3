"""One context: a model, a prompt, its KV and its logits, all computed on the device. Needs torch."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.compute.shapes import ModelShape
from bench.device.accelerator import Accelerator
from bench.device.kv import poison
from bench.device.model import Model, relative_error

RECOMPUTE_RUNS = 2
RESIDENT_RUNS = 2


@dataclass(frozen=True, slots=True)
class Subject:
    """`reference` is the whole prompt's KV, `logits` what follows it, `cache` what runs fill; `recompute_s` are TTFTs
    without any cached KV, `blind_error` how far off the logits are when the values of every cached token are wrong.
    """

    model: Model
    tokens: Tensor
    cache: Tensor
    reference: Tensor
    logits: Tensor
    recompute_s: tuple[float, ...]
    blind_error: float

    @property
    def accelerator(self) -> Accelerator:
        """The model's."""
        return self.model.accelerator

    def logits_error(self, logits: Tensor) -> float:
        """Against those of the prompt computed whole."""
        return relative_error(logits, self.logits)

    def resident_s(self, cached_tokens: int) -> float:
        """TTFT with the prefix's KV on the device already: the median after a run that is not counted."""
        self.cache[:, :, :cached_tokens].copy_(self.reference[:, :, :cached_tokens])
        return statistics.median([prefill_s(self, cached_tokens)[0] for _ in range(RESIDENT_RUNS + 1)][1:])


def prefill_s(subject: Subject, cached_tokens: int) -> tuple[float, Tensor]:
    """Seconds until the first token is known to the host, and its logits; the prefix is on the device."""
    return _timed_prefill(subject.model, subject.tokens, subject.cache, cached_tokens)


def make_subject(model: Model, token_count: int, blind_tokens: int, seed: int) -> Subject:
    """Prefill the prompt. `blind_tokens` is how many are given wrong values, to see whether the logits show it."""
    tokens = model.random_tokens(token_count, seed)
    cache = model.empty_cache(token_count)
    poison(cache)
    timed = [_timed_prefill(model, tokens, cache, 0) for _ in range(RECOMPUTE_RUNS + 1)]
    reference = cache.clone()
    logits = timed[-1][1]
    cache[:, 1, :blind_tokens].neg_()
    _, blind = _timed_prefill(model, tokens, cache, blind_tokens)
    cache.copy_(reference)
    seconds = tuple(seconds for seconds, _ in timed[1:])
    return Subject(model, tokens, cache, reference, logits, seconds, relative_error(blind, logits))


def make_model(shape: ModelShape, vocabulary: int, accelerator: Accelerator, seed: int, tokens_max: int) -> Model:
    """Random weights; tensors no longer in use are given back to the device first."""
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()
    return Model(shape, vocabulary, accelerator, seed, tokens_max)


def _timed_prefill(model: Model, tokens: Tensor, cache: Tensor, cached_tokens: int) -> tuple[float, Tensor]:
    model.accelerator.synchronize()
    started_s = time.perf_counter()
    logits = model.prefill(tokens, cache, cached_tokens, _nothing)
    int(logits.argmax())  # waits for the device
    return time.perf_counter() - started_s, logits


def _nothing(_: int) -> None:
    """Every layer is there."""
