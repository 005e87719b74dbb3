"""The losses of each form of KV, from samples of several texts. Pure.

    KL           of the next token's distribution from that on exact KV, in nats a token
    perplexity   of the text, over that on exact KV
    agreement    the part of the tokens whose most likely one stays
    recall       the change of the log-probability of the right code, in nats a code; and the part of codes all right

A form is on the curve where none that is no larger loses less, neither by KL nor by recall.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from objectcache.calibration.intervals import MeanInterval, mean_interval


@dataclass(frozen=True, slots=True)
class TextSample:
    """One form on one text: means over its tokens, and over its facts."""

    kl: float
    nll_change: float
    agreement: float
    recall_change: float
    recall_right: float


SAME_SIZE = 1.001
"""Forms whose bytes differ by less are as large as each other: numbers of 3 bits are filled up to 8."""
_BOUNDS = {
    "kl": (0.0, math.inf), "nll_change": (-math.inf, math.inf), "agreement": (0.0, 1.0),
    "recall_change": (-math.inf, math.inf), "recall_right": (0.0, 1.0),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FormLoss:
    """One form: the part of the exact bytes that it takes, the errors of its chunks, and its losses over all texts."""

    codec: str
    bytes_part: float
    worst_error: float
    mean_error: float
    samples: tuple[TextSample, ...]

    def interval(self, name: str) -> MeanInterval:
        """The mean of one of the losses over the texts."""
        return mean_interval([getattr(each, name) for each in self.samples]).within(*_BOUNDS[name])

    @property
    def kl(self) -> float:
        """The mean KL."""
        return self.interval("kl").mean

    @property
    def recall_change(self) -> float:
        """The mean change of the log-probability of a right code."""
        return self.interval("recall_change").mean

    def row(self) -> dict[str, Any]:
        """The figures, for JSON."""
        ratio = self.interval("nll_change").mapped(lambda nats: math.exp(min(nats, 700.0)))
        return {
            "codec": self.codec, "bytes": self.bytes_part, "worst_error": self.worst_error,
            "mean_error": self.mean_error,
            "kl": asdict(self.interval("kl")), "perplexity_over_exact": asdict(ratio),
            "agreement": asdict(self.interval("agreement")),
            "recall_change": asdict(self.interval("recall_change")),
            "recall_right": asdict(self.interval("recall_right")),
            "samples": [asdict(each) for each in self.samples],
        }  # fmt: skip


def on_curve(losses: Sequence[FormLoss]) -> frozenset[str]:
    """The codecs that no other one beats: none takes as few bytes, or fewer, and loses less by KL and by recall."""
    return frozenset(
        mine.codec
        for mine in losses
        if not any(
            other.bytes_part <= mine.bytes_part * SAME_SIZE
            and other.kl < mine.kl
            and other.recall_change > mine.recall_change
            for other in losses
        )
    )


def cells(losses: Sequence[FormLoss], qualities: Mapping[str, float]) -> tuple[list[str], list[list[str]]]:
    """The heads and rows of the table that people see."""
    curve = on_curve(losses)
    heads = [
        "codec", "bytes", "KL", "perplexity over exact", "same answers", "log-prob of a fact", "facts right",
        "worst error", "quality", "on the curve",
    ]  # fmt: skip
    rows = []
    for each in losses:
        row = each.row()
        ratio = MeanInterval(**row["perplexity_over_exact"])
        rows.append([
            each.codec, f"{each.bytes_part:.3f}", each.interval("kl").text(".5f"), ratio.text(".4f"),
            each.interval("agreement").text(".4f"), each.interval("recall_change").text("+.3f"),
            f"{each.interval('recall_right').mean:.3f}", f"{each.worst_error:.3f}",
            f"{qualities[each.codec]:.4f}", "yes" if each.codec in curve else "no",
        ])  # fmt: skip
    return heads, rows
