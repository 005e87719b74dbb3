"""Counts of deliveries and lookups, for the metrics (descriptors.metrics lists them)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from descriptors import metrics
from descriptors.layer_forms import LayerForms
from descriptors.notices import Mode
from descriptors.tracing import Phase
from objectcache.adapters.metrics import Distribution, Reading, Tally
from objectcache.adapters.phases import Phases

DONE = "done"
_PHASES = (Phase.PLAN, Phase.WAIT, Phase.GATHER, Phase.TRANSFER)


@dataclass(slots=True)
class DeliveryMeter:
    """Counts deliveries and lookups. Used on one event loop."""

    deliveries: Tally = field(default_factory=Tally)
    payload_bytes: Tally = field(default_factory=Tally)
    phase_seconds: Tally = field(default_factory=Tally)
    duration_s: Distribution = field(default_factory=lambda: Distribution(metrics.SECONDS))
    first_layer_phase_seconds: Tally = field(default_factory=Tally)
    first_layer_s: Distribution = field(default_factory=lambda: Distribution(metrics.SECONDS))
    form_chunks: Tally = field(default_factory=Tally)
    worst_error: Distribution = field(default_factory=lambda: Distribution(metrics.ERRORS))
    worst_loss: Distribution = field(default_factory=lambda: Distribution(metrics.LOSSES))
    lookup_count: int = 0
    asked_chunk_count: int = 0
    matched_chunk_count: int = 0

    def ended(self, transport: str, mode: Mode | None, outcome: str, nbytes: int, phases: Phases) -> None:
        """Count a delivery that is over. `outcome` is DONE or an error code. Without a mode it ended
        before its plan.
        """
        self.deliveries.add(1, transport, "none" if mode is None else mode.value, outcome)
        self.payload_bytes.add(nbytes, transport)
        for phase in _PHASES:
            self.phase_seconds.add(phases.seconds(phase), phase.value)
        self.duration_s.observe(phases.total_s, transport)

    def delivered(self, forms: LayerForms) -> None:
        """Count the forms of a delivery's chunks, to a reader that accepts codecs."""
        for run in forms.runs:
            self.form_chunks.add(run.chunk_count, run.codec)
        self.worst_error.observe(forms.worst_error)
        if forms.loss_basis is not None:
            self.worst_loss.observe(forms.worst_loss, forms.loss_basis.value)

    def first_layer(self, transport: str, phases: Phases) -> None:
        """Count the first layer of a layer-major delivery, which was handed over now."""
        self.first_layer_s.observe(phases.total_s, transport)
        for phase in _PHASES:
            self.first_layer_phase_seconds.add(phases.seconds(phase), transport, phase.value)

    def looked_up(self, asked_count: int, matched_count: int) -> None:
        """Count a lookup of `asked_count` chunks that found `matched_count` of them."""
        self.lookup_count += 1
        self.asked_chunk_count += asked_count
        self.matched_chunk_count += matched_count

    def readings(self) -> Iterator[Reading]:
        yield metrics.DELIVERIES, self.deliveries.samples
        yield metrics.DELIVERY_BYTES, self.payload_bytes.samples
        yield metrics.DELIVERY_PHASE_SECONDS, self.phase_seconds.samples
        yield metrics.DELIVERY_SECONDS, self.duration_s
        yield metrics.FIRST_LAYER_SECONDS, self.first_layer_s
        yield metrics.FIRST_LAYER_PHASE_SECONDS, self.first_layer_phase_seconds.samples
        yield metrics.DELIVERY_FORMS, self.form_chunks.samples
        yield metrics.DELIVERY_ERROR, self.worst_error
        yield metrics.DELIVERY_LOSS, self.worst_loss
        yield metrics.LOOKUPS, _one(self.lookup_count)
        yield metrics.LOOKUP_ASKED, _one(self.asked_chunk_count)
        yield metrics.LOOKUP_MATCHED, _one(self.matched_chunk_count)


def _one(value: float) -> dict[tuple[str, ...], float]:
    """The sample of a metric without labels."""
    return {(): value}
