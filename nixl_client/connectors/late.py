"""When a load that is under way is not worth waiting for any more, and how much of it still is. Pure.

A load of k chunks and L layers has `left` layers to come, one every `pace_s` by what came last, after a silence that is
expected to last as long again as it has: a wait by this rule never costs much more than twice as much as giving up at
once. The choices, and what each costs:

    go on                   left * pace + silence
    fetch n of k chunks     silence + L * pace * n/k, then C(n)
    give up                 C(0)

C(n) is the time to compute the tokens of all chunks but the first n. Layers that came stay, but a fetch begins with
layer 0 again, over the same connection. The forward pass under way goes on in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from descriptors.recompute import PrefillCosts

GAIN_MIN = 0.2
"""Less than this part of the time must not be worth a change of mind."""
GAIN_MIN_S = 0.005
RECHECK_MIN_S = 0.002
PACE_LAYERS = 4
"""The last so many layers tell the pace."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """`layers_left` of `num_layers` have not come. The last layers took `pace_s` each (0: not known), and none has come
    for `silent_s`. A chunk-major delivery counts as one layer, since all its layers are complete at once.
    """

    num_layers: int
    layers_left: int
    pace_s: float
    silent_s: float

    @property
    def remaining_s(self) -> float:
        """How long the rest should take."""
        return self.layers_left * self.pace_s + self.silent_s


@dataclass(frozen=True, slots=True)
class Tail:
    """The tokens of a load: `chunk_count` chunks of `chunk_tokens` from token `start` on, to token `end`."""

    start: int
    end: int
    chunk_tokens: int
    chunk_count: int

    def recompute_s(self, costs: PrefillCosts) -> np.ndarray:
        """C(n) in seconds for n = 0 to chunk_count."""
        first = self.start // self.chunk_tokens
        kept = np.arange(first, first + self.chunk_count + 1, dtype=np.float64) * self.chunk_tokens
        return costs.prefill_s(self.end, np.clip(kept, self.start, self.end))


@dataclass(frozen=True, slots=True)
class LoadVerdict:
    """Go on with the first `chunk_count` chunks of the load, and judge again after `recheck_s` without a layer."""

    chunk_count: int
    recheck_s: float


def judge(progress: LoadProgress, tail: Tail, costs: PrefillCosts, layer_compute_s: float = 0.0) -> LoadVerdict:
    """The best choice for the load, in a step that computes each layer in `layer_compute_s`."""
    count = tail.chunk_count
    forward_s = progress.layers_left * layer_compute_s
    others_s = tail.recompute_s(costs)[:-1] + forward_s
    if progress.pace_s:
        fetched_s = progress.silent_s + progress.num_layers * progress.pace_s * np.arange(count) / count
        fetched_s[0] = 0.0
        others_s += np.maximum(0.0, fetched_s - forward_s)
        best = int(others_s.argmin())
    else:
        best = 0
    going_on_s = max(progress.remaining_s, forward_s)
    bearable_s = max(others_s[best] / (1 - GAIN_MIN), others_s[best] + GAIN_MIN_S)
    if going_on_s > bearable_s:
        return LoadVerdict(best, 0.0)
    return LoadVerdict(count, max(RECHECK_MIN_S, float(bearable_s - going_on_s)))


def pace_s(ready_at_s: list[float]) -> float:
    """Seconds between layers, from the times the last of them came; 0 where that is not known."""
    last = ready_at_s[-PACE_LAYERS - 1 :]
    return (last[-1] - last[0]) / (len(last) - 1) if len(last) > 1 else 0.0
