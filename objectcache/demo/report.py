"""The findings of the demo: whether the logits agree, how long the first token took, and both as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from descriptors.ttft import ttft_layerwise_s
from descriptors.units import format_bytes
from nixl_client.client import Transport
from nixl_client.connectors.transformers import KvShape
from objectcache.demo.measure import ModelAnswer, RunTimes

LOGITS_DIFFERENCE_MAX = 1e-3


@dataclass(frozen=True, slots=True)
class Agreement:
    """Largest absolute differences of the last token's logits from a full prefill's, and bit-equality with the same
    forward pass over the same KV kept in memory.

    `foreign_chunk_*`: a chunk of the prefix swapped with one that lies behind it (other tokens). `swapped_inside_*`:
    two chunks of the prefix swapped. Keys carry their positions, so full attention sums the same terms in another
    order: only the bits can tell.
    """

    layer_major_difference: float
    chunk_major_difference: float
    is_layer_major_bit_equal: bool
    is_chunk_major_bit_equal: bool
    foreign_chunk_difference: float
    swapped_inside_difference: float
    is_swapped_inside_bit_equal: bool

    @property
    def is_right_accepted(self) -> bool:
        """The fetched prefix gives the logits of a full prefill, to the bit where the arithmetic is the same."""
        differences = (self.layer_major_difference, self.chunk_major_difference)
        is_bit_equal = self.is_layer_major_bit_equal and self.is_chunk_major_bit_equal
        return max(differences) <= LOGITS_DIFFERENCE_MAX and is_bit_equal

    @property
    def is_wrong_refused(self) -> bool:
        """Both swaps fail the comparison they must fail."""
        return self.foreign_chunk_difference > LOGITS_DIFFERENCE_MAX and not self.is_swapped_inside_bit_equal

    def text(self) -> str:
        """For people."""
        same = _yes(self.is_layer_major_bit_equal and self.is_chunk_major_bit_equal)
        inside = (
            f"{_yes(self.is_swapped_inside_bit_equal)} (must not be), differs by {self.swapped_inside_difference:.1e}"
        )
        lines = (
            f"layer-major and a full prefill    differ by {self.layer_major_difference:.1e} (at most 1e-3)",
            f"chunk-major and a full prefill    differ by {self.chunk_major_difference:.1e} (at most 1e-3)",
            f"both and the same KV in memory    bit-equal: {same} (must be)",
            f"a chunk swapped with a later one  differs by {self.foreign_chunk_difference:.1e} (must exceed 1e-3)",
            f"two chunks swapped in the prefix  bit-equal: {inside}",
            "  (keys carry their positions: attention adds the same terms in another order)",
        )
        return "\n".join(f"  {line}" for line in lines)


@dataclass(frozen=True, slots=True)
class Timings:
    """TTFT of the question each way, and the layers' transfer (X) and compute (C) times measured apart, in seconds."""

    recompute: RunTimes
    chunk_major: RunTimes
    layer_major: RunTimes
    transfer_s: Sequence[float]
    compute_s: Sequence[float]

    @property
    def eq3_ttft_s(self) -> float:
        """TTFT by Eq. 3, from X and C."""
        return ttft_layerwise_s(self.transfer_s, self.compute_s)

    def text(self) -> str:
        """For people."""
        lines = ["  TTFT [ms]       median       min       max   runs"]
        for name, spread in self._spreads().items():
            seconds = (spread.median_s, spread.min_s, spread.max_s)
            lines.append(f"  {name:12}" + "".join(f"{1e3 * s:10.1f}" for s in seconds) + f"{spread.count:7}")
        ratio = self.layer_major.median_s / self.eq3_ttft_s
        lines.append(f"  Eq. 3       {1e3 * self.eq3_ttft_s:10.1f}   layer-major measured is {ratio:.2f} of it")
        total_ms = 1e3 * sum(self.transfer_s), 1e3 * sum(self.compute_s)
        lines.append(f"  (from transfer {total_ms[0]:.0f} ms and compute {total_ms[1]:.0f} ms, medians measured apart)")
        return "\n".join(lines)

    def to_fields(self) -> dict[str, Any]:
        """As a JSON object."""
        spreads = {name.replace("-", "_"): asdict(spread) for name, spread in self._spreads().items()}
        return {
            "ttft": spreads,
            "eq3_ttft_s": self.eq3_ttft_s,
            "transfer_s": list(self.transfer_s),
            "compute_s": list(self.compute_s),
        }

    def _spreads(self) -> dict[str, RunTimes]:
        return {"recompute": self.recompute, "chunk-major": self.chunk_major, "layer-major": self.layer_major}


@dataclass(frozen=True, slots=True)
class Said:
    """The model's two answers to the second question: computed by itself, and on the loaded prefix."""

    question: str
    computed: str
    loaded: str

    @property
    def is_equal(self) -> bool:
        """Nobody can tell which one was loaded."""
        return self.computed == self.loaded

    def text(self, timings: Timings, nbytes: int, transport: Transport) -> str:
        """For people."""
        computed_s, loaded_s = timings.recompute.median_s, timings.layer_major.median_s
        link = f"{format_bytes(nbytes)} over {transport.value}, {computed_s / loaded_s:.1f} times as fast"
        return (
            f"{self.question}\n"
            f"  computed  {computed_s:7.2f} s to the first token: {self.computed}\n"
            f"  loaded    {loaded_s:7.2f} s to the first token: {self.loaded}\n"
            f"            ({link}; the answers are {'equal' if self.is_equal else 'NOT EQUAL'})"
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """All that the demo found; `layer_major` and `chunk_major` are the runs with the median TTFT."""

    model: str
    document_tokens: int
    question_tokens: int
    shape: KvShape
    transport: Transport
    cores: int
    said: Said
    agreement: Agreement
    timings: Timings
    layer_major: ModelAnswer
    chunk_major: ModelAnswer

    @property
    def is_good(self) -> bool:
        """The loaded prefix gives the model's own answer, and wrong prefixes are noticed."""
        return self.agreement.is_right_accepted and self.agreement.is_wrong_refused and self.said.is_equal

    @property
    def delivered_bytes(self) -> int:
        """The bytes of the prefix, which went over the link for each answer."""
        return self.shape.layout.delivery_bytes(self.document_tokens // self.shape.chunk_tokens)

    def title(self) -> str:
        """The picture's title."""
        recompute_s = self.timings.recompute.median_s
        return (
            f"{self.model}: a question of {self.question_tokens} tokens after {self.document_tokens:,} cached ones, "
            f"over {self.transport.name}; recomputing all of them takes {recompute_s:.1f} s"
        )

    def to_fields(self) -> dict[str, Any]:
        """The JSON object: machine, sizes, agreement, times in seconds."""
        agreement, layout = self.agreement, self.shape.layout
        return {
            "model": self.model,
            **asdict(self.said),
            "is_equal": self.said.is_equal,
            "delivered_bytes": self.delivered_bytes,
            "cores": self.cores,
            "transport": self.transport.value,
            "document_tokens": self.document_tokens,
            "question_tokens": self.question_tokens,
            "num_layers": layout.num_layers,
            "layer_bytes": layout.layer_bytes(self.document_tokens // layout.chunk_tokens),
            "is_right_accepted": agreement.is_right_accepted,
            "is_wrong_refused": agreement.is_wrong_refused,
            **asdict(agreement),
            **self.timings.to_fields(),
            "layer_major_stall_s": self.layer_major.stall_s,
            "chunk_major_stall_s": self.chunk_major.stall_s,
        }


def _yes(value: bool) -> str:
    return "yes" if value else "no"
