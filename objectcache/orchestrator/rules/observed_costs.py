"""Costs of engines as they are seen from here. All fits are lines by medians, so that a late one moves them little.

TTFT = request_us + token_us * tokens computed                      an engine that publishes no costs
time of a prefill = fixed_s + factor * the time by its costs        an engine that does
time of a step = height + slope * streams                           every engine
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from descriptors.recompute import PrefillCosts

SAMPLES_MAX = 48
SAMPLES_MIN = 6
SPREAD_MIN = 64
"""Slopes are taken between prompts that differ by so many tokens."""
TOKEN_US_DEFAULT = 100.0
TOKEN_US_MIN, TOKEN_US_MAX = 0.1, 1e6
PREFILLS_MAX = 32
SPREAD_SHARE = 0.1
"""Slopes are taken between prefills that differ by so much of the longest."""
TOGETHER_S, TOGETHER_SHARE = 0.005, 0.1
"""First bytes that come within so much, and so much of the time before them, are of one step of the engine."""
STEPS_MAX = 64
GROWTH_S_MAX = 60.0
CHANGED_SHARE = 0.25
"""Between two looks at a step's time the number of streams may change by so much."""
STREAMS_SPREAD = 2.0
"""Slopes are taken between times of steps whose streams differ by so many."""
FACTOR_MIN, FACTOR_MAX = 0.25, 4.0
FIXED_S_MAX = 1.0


class ObservedCosts:
    """The samples of one engine."""

    def __init__(self, token_us: float = TOKEN_US_DEFAULT) -> None:
        self._default = PrefillCosts(token_us)
        self._samples: deque[tuple[int, float]] = deque(maxlen=SAMPLES_MAX)
        self._fitted: PrefillCosts | None = None

    def note(self, computed_tokens: int, ttft_s: float) -> None:
        """A request that did not wait: the tokens that were computed for it, and its TTFT."""
        if computed_tokens > 0 and ttft_s > 0:
            self._samples.append((computed_tokens, ttft_s * 1e6))
            self._fitted = None

    @property
    def costs(self) -> PrefillCosts:
        """The fit, or the default where there are too few samples."""
        if len(self._samples) < SAMPLES_MIN:
            return self._default
        if self._fitted is None:
            token_us, request_us = median_line(self._samples, SPREAD_MIN, TOKEN_US_MIN, TOKEN_US_MAX)
            self._fitted = PrefillCosts(token_us, 0.0, request_us)
        return self._fitted


@dataclass(frozen=True, slots=True)
class Correction:
    """A prefill takes `fixed_s` and `factor` times the seconds that the engine's costs say."""

    factor: float = 1.0
    fixed_s: float = 0.0

    def corrected(self, prefill: PrefillCosts) -> PrefillCosts:
        """The costs with the correction."""
        if self is EXACT:
            return prefill
        return PrefillCosts(
            prefill.token_us * self.factor,
            prefill.token_pair_us * self.factor,
            prefill.request_us * self.factor + self.fixed_s * 1e6,
        )

    def work_s(self, corrected_s: float) -> float:
        """The time by the engine's costs of a prefill of this corrected time."""
        return max(0.0, corrected_s - self.fixed_s) / self.factor


EXACT = Correction()


class ObservedPrefills:
    """The last prefills of one engine: the seconds by its costs, and those that passed. An engine computes several
    short prompts in one step, and then their first bytes come together: they count as one prefill.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=PREFILLS_MAX)
        self._end_s = 0.0
        self._correction: Correction | None = EXACT

    def note(self, work_s: float, began_s: float, now_s: float) -> None:
        """A first byte came now. The engine has worked since `began_s`, when the one before it came, or when this
        prompt did; `work_s` is the prefill by its costs.
        """
        took_s = max(0.0, now_s - began_s)
        if self._samples:
            before_work_s, before_s = self._samples[-1]
            if now_s - self._end_s <= TOGETHER_S + TOGETHER_SHARE * before_s and began_s <= self._end_s:
                self._samples[-1] = before_work_s + work_s, before_s + took_s
                self._end_s, self._correction = now_s, None
                return
        self._samples.append((work_s, took_s))
        self._end_s, self._correction = now_s, None

    @property
    def correction(self) -> Correction:
        """The correction of its costs; none where there are too few samples."""
        if self._correction is None:
            self._correction = EXACT
            if len(self._samples) >= SAMPLES_MIN:
                spread = SPREAD_SHARE * max(work_s for work_s, _ in self._samples)
                factor, fixed_s = median_line(self._samples, spread, FACTOR_MIN, FACTOR_MAX)
                self._correction = Correction(factor, min(fixed_s, FIXED_S_MAX))
        return self._correction


@dataclass(frozen=True, slots=True)
class Output:
    """An engine's metrics at a time: its streams, the tokens that it has put out, and the answers that have ended.
    Tokens and answers are counted since the engine's start.
    """

    at_s: float
    running: int
    tokens: float
    answers: float


class ObservedSteps:
    """How one engine's steps grow with its streams, by looks at its metrics. A stream gets a token in each step."""

    def __init__(self) -> None:
        self._looks: deque[Output] = deque(maxlen=STEPS_MAX)
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS_MAX)
        """Streams, and the time of a step."""
        self.growth_s: float | None = None
        """The time that one more stream takes from each other one over its whole answer; None while nobody knows."""

    def note(self, look: Output) -> None:
        """Take a look at the metrics. Counts that go back are those of another process."""
        before = self._looks[-1] if self._looks else None
        if before is not None and (look.tokens < before.tokens or look.answers < before.answers):
            self._looks.clear()
            self._steps.clear()
            self.growth_s, before = None, None
        self._looks.append(look)
        if before is None or look.tokens <= before.tokens or look.at_s <= before.at_s:
            return
        streams = (look.running + before.running) / 2
        if streams >= 1 and abs(look.running - before.running) <= CHANGED_SHARE * streams:
            step_s = streams * (look.at_s - before.at_s) / (look.tokens - before.tokens)
            if math.isfinite(step_s):
                self._steps.append((streams, step_s))
                self._fit()

    def _fit(self) -> None:
        """Fit a line anew; what is known stays while streams do not change or no answer ends."""
        streams = [count for count, _ in self._steps]
        answers = self._looks[-1].answers - self._looks[0].answers
        if len(streams) < SAMPLES_MIN or max(streams) - min(streams) < STREAMS_SPREAD or answers < 1:
            return
        slope_s, _ = median_line(self._steps, STREAMS_SPREAD, 0.0, min(step_s for _, step_s in self._steps))
        growth_s = slope_s * (self._looks[-1].tokens - self._looks[0].tokens) / answers
        if math.isfinite(growth_s):
            self.growth_s = min(growth_s, GROWTH_S_MAX)


def median_line(
    samples: Sequence[tuple[float, float]], spread: float, slope_min: float, slope_max: float
) -> tuple[float, float]:
    """Slope and height, not below 0, of a line through samples (x, y) of at least one: the median of the slopes between
    those whose x differ by `spread` (Theil and Sen), and the median of what is left. Where no two differ so much, the
    slope is the median of y / x.
    """
    x, y = np.asarray(samples, dtype=np.float64).T
    first, second = np.triu_indices(len(x), 1)
    apart = np.abs(x[second] - x[first]) >= max(spread, 1e-9)
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = (y[second] - y[first])[apart] / (x[second] - x[first])[apart]
        rates = (y / x)[x > 0]
    slope = np.median(slopes) if slopes.size else np.median(rates) if rates.size else 1.0
    slope = float(min(max(slope, slope_min), slope_max))
    return slope, max(0.0, float(np.median(y - slope * x)))
