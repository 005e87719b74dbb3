"""The orchestrator's metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Protocol

from descriptors import metrics
from objectcache.adapters.metrics import Distribution, Reading, Tally, text_of
from objectcache.orchestrator.engine import Engine
from objectcache.orchestrator.gate import Gate
from objectcache.orchestrator.receipts import Receipt
from objectcache.orchestrator.rules.policies import Decision
from objectcache.orchestrator.rules.prefix_index import PrefixIndex

_STATUSES = frozenset({0, *HTTPStatus})


class Parts(Protocol):
    """The parts whose state is told."""

    engines: dict[str, Engine]
    gate: Gate
    index: PrefixIndex


class Meter:
    """Counts what happens; the state of the parts is read when the metrics are asked for."""

    def __init__(self) -> None:
        self._requests = Tally()
        self._ttft = Distribution(metrics.ORCHESTRATOR_TTFT.buckets)
        self._error = Distribution(metrics.ORCHESTRATOR_PREDICTION_ERROR.buckets)
        self._decisions = Distribution(metrics.ORCHESTRATOR_DECISION.buckets)
        self._waits = Distribution(metrics.ORCHESTRATOR_WAIT.buckets)
        self._reasons = Tally()
        self._tokens = Tally()
        self._failovers = Tally()
        self._mismatches = Tally()
        self._failovers.add(0)
        self._mismatches.add(0)

    def decided(self, decision: Decision, took_s: float) -> None:
        """An engine was chosen."""
        self._decisions.observe(took_s)
        self._reasons.add(1, decision.reason.replace(" ", "_"))
        prediction = decision.prediction
        self._tokens.add(prediction.held_tokens, "held")
        self._tokens.add(prediction.load_tokens, "stored")

    def failed_over(self) -> None:
        """An engine failed before it had answered."""
        self._failovers.add(1)

    def mismatched(self) -> None:
        """The tokens here are not an engine's own."""
        self._mismatches.add(1)

    def ended(self, receipt: Receipt) -> None:
        """A request is over."""
        status = receipt.status or 0
        is_known = status in _STATUSES  # else an engine could have any number of lines
        self._requests.add(1, receipt.path, str(status) if is_known else "other")
        self._waits.observe(receipt.waited_s)
        if receipt.ttft_s is not None:
            self._ttft.observe(receipt.ttft_s)
            if receipt.predictions:
                self._error.observe(abs(receipt.ttft_s - receipt.waited_s - receipt.predictions[0]["ttft_s"]))

    def text(self, orchestrator: Parts) -> bytes:
        """Prometheus' text."""
        return text_of([*self._counted(), *_state(orchestrator)])

    def _counted(self) -> Iterator[Reading]:
        yield metrics.ORCHESTRATOR_REQUESTS, self._requests.samples
        yield metrics.ORCHESTRATOR_TTFT, self._ttft
        yield metrics.ORCHESTRATOR_PREDICTION_ERROR, self._error
        yield metrics.ORCHESTRATOR_DECISION, self._decisions
        yield metrics.ORCHESTRATOR_WAIT, self._waits
        yield metrics.ORCHESTRATOR_REASONS, self._reasons.samples
        yield metrics.ORCHESTRATOR_TOKENS, self._tokens.samples
        yield metrics.ORCHESTRATOR_FAILOVERS, self._failovers.samples
        yield metrics.ORCHESTRATOR_MISMATCHES, self._mismatches.samples


def _state(orchestrator: Parts) -> Iterator[Reading]:
    now_s = time.monotonic()
    engines = list(orchestrator.engines.values())
    admission = orchestrator.gate.admission
    yield metrics.ORCHESTRATOR_ACTIVE, {(): float(admission.active_count)}
    yield metrics.ORCHESTRATOR_WAITING, {(): float(admission.waiting_count + orchestrator.gate.without_engine_count)}
    yield metrics.ORCHESTRATOR_BLOCKS, {(): float(orchestrator.index.block_count)}
    states: dict[tuple[str, ...], float] = {}
    for engine in engines:
        label = (engine.liveness.status(now_s).value,)
        states[label] = states.get(label, 0.0) + 1
    yield metrics.ORCHESTRATOR_ENGINES, states
    yield (
        metrics.ORCHESTRATOR_EVENT_GAPS,
        {(): float(sum(feed.gap_count for engine in engines for feed in engine.blocks.feeds.values()))},
    )
    yield metrics.ORCHESTRATOR_QUEUE, {(engine.name,): engine.books.load(now_s).queue_s for engine in engines}
