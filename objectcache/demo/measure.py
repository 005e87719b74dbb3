"""Answering the question on a fetched prefix, with the times of every step. All times are monotonic seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from transformers import DynamicCache

from descriptors.descriptor import Delivery
from nixl_client.client import Client
from nixl_client.connectors.transformers import KvShape, LayerWait, WaitingCache
from nixl_client.fetch.layer_fetch import LayerFetch
from objectcache.demo.model import Subject, decode, logits_of_last

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """When the model was inside one decoder layer, its wait for the prefix included."""

    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """One answer to the question: the last token's logits (vocabulary,), the answer's tokens if they were asked for,
    and when things happened until the first one.
    """

    logits: torch.Tensor
    tokens: list[int]
    started_s: float
    lookup_ended_s: float
    forward_started_s: float
    finished_s: float
    spans: tuple[LayerSpan, ...]
    waits: tuple[LayerWait, ...]

    @property
    def ttft_s(self) -> float:
        """From the lookup to the last token's logits."""
        return self.finished_s - self.started_s

    @property
    def transfer_s(self) -> list[float]:
        """X: what each layer's arrival added to that of those before it; X_0 contains the lookup and the request."""
        ready = [self.started_s, *accumulate((wait.ready_at_s for wait in self.waits), max)]
        return [after - before for before, after in pairwise(ready)]

    @property
    def compute_s(self) -> list[float]:
        """C: each layer's computing without its wait; what precedes layer 0 and follows the last counts to them."""
        edges = [self.forward_started_s, *(span.ended_s for span in self.spans[:-1]), self.finished_s]
        whole = [after - before for before, after in pairwise(edges)]
        return [seconds - (wait.ended_s - wait.started_s) for seconds, wait in zip(whole, self.waits, strict=True)]

    @property
    def stall_s(self) -> float:
        """All the time the model waited for layers."""
        return sum(wait.ended_s - wait.started_s for wait in self.waits)


@dataclass(slots=True)
class ServingNode:
    """A model, a client, and the buffer (uint8) its prefix is fetched into."""

    subject: Subject
    client: Client
    shape: KvShape
    buffer: torch.Tensor

    def answer_as_layers_arrive(self, keys: Sequence[str], question: list[int], delivery: Delivery) -> ModelAnswer:
        """Look `keys` up, fetch the stored prefix, and run the model on it layer by layer as it arrives."""
        return self._answer(keys, question, delivery, lambda fetch: None)

    def whole_answer(self, keys: Sequence[str], question: list[int]) -> ModelAnswer:
        """The same, with all tokens of the answer."""
        return self._answer(keys, question, Delivery.LAYER_MAJOR, lambda fetch: None, is_whole=True)

    def answer_after_transfer(self, keys: Sequence[str], question: list[int]) -> ModelAnswer:
        """The same layer by layer, but computing only once everything is there: transfer and compute undisturbed."""
        return self._answer(keys, question, Delivery.LAYER_MAJOR, _wait)

    def _answer(
        self,
        keys: Sequence[str],
        question: list[int],
        delivery: Delivery,
        before_compute: Callable[[LayerFetch], None],
        is_whole: bool = False,
    ) -> ModelAnswer:
        started_s = time.monotonic()
        matched = self.client.lookup(keys)
        lookup_ended_s = time.monotonic()
        with self.client.fetch(keys[:matched], self.shape.layout, self.buffer, delivery=delivery) as fetch:
            before_compute(fetch)
            cache = WaitingCache(fetch, self.shape, timeout_s=TIMEOUT_S)
            with _layer_spans(self.subject) as spans:
                forward_started_s = time.monotonic()
                logits = logits_of_last(self.subject.model, question, cache)
                finished_s = time.monotonic()
            fetch.wait(TIMEOUT_S)
        waits = tuple(wait for wait in cache.waits if wait is not None)
        tokens = decode(self.subject, logits, cache) if is_whole else []
        return ModelAnswer(
            logits=logits,
            tokens=tokens,
            started_s=started_s,
            lookup_ended_s=lookup_ended_s,
            forward_started_s=forward_started_s,
            finished_s=finished_s,
            spans=tuple(spans),
            waits=waits,
        )


def prefill(
    subject: Subject, tokens: list[int], on_layer: Callable[[], object]
) -> tuple[torch.Tensor, DynamicCache, float]:
    """Run the model on all tokens: the last token's logits, the filled cache, and the seconds it took. `on_layer` is
    called after every layer.
    """

    def count(*_: object) -> None:
        on_layer()

    hooks = [layer.register_forward_hook(count) for layer in subject.layers]
    cache = DynamicCache()
    started_s = time.monotonic()
    logits = logits_of_last(subject.model, tokens, cache)
    seconds = time.monotonic() - started_s
    for hook in hooks:
        hook.remove()
    return logits, cache, seconds


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Several runs of one thing, in seconds."""

    median_s: float
    min_s: float
    max_s: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> RunTimes:
        """The spread of at least one run."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """The median of each column: of each layer, over several runs."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def median_run(answers: Sequence[ModelAnswer]) -> ModelAnswer:
    """The answer with the median TTFT (the lower one of an even count)."""
    return sorted(answers, key=lambda answer: answer.ttft_s)[(len(answers) - 1) // 2]


@contextmanager
def computing_on(cores: int) -> Iterator[None]:
    """Let torch use this many cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _wait(fetch: LayerFetch) -> None:
    fetch.wait(TIMEOUT_S)


@contextmanager
def _layer_spans(subject: Subject) -> Iterator[list[LayerSpan]]:
    """Collects a LayerSpan for each decoder layer the model runs."""
    spans: list[LayerSpan] = []
    began_s = [0.0]

    def enter(*_: object) -> None:
        began_s[0] = time.monotonic()

    def leave(*_: object) -> None:
        spans.append(LayerSpan(began_s[0], time.monotonic()))

    layers = subject.layers
    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    try:
        yield spans
    finally:
        for hook in hooks:
            hook.remove()
