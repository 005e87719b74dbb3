"""Prefill costs of an engine that publishes none: fitted from the first tokens of requests that did not wait.

TTFT = request_us + token_us * tokens computed      by the median of slopes between pairs (Theil and Sen)
"""

from __future__ import annotations

from collections import deque
from itertools import combinations
from statistics import median

from descriptors.recompute import PrefillCosts

SAMPLES_MAX = 48
SAMPLES_MIN = 6
SPREAD_MIN = 64
"""Slopes are taken between prompts that differ by so many tokens."""
TOKEN_US_DEFAULT = 100.0
TOKEN_US_MIN, TOKEN_US_MAX = 0.1, 1e6


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
            self._fitted = self._fit()
        return self._fitted

    def _fit(self) -> PrefillCosts:
        slopes = [
            (y - x_us) / (b - a) for (a, x_us), (b, y) in combinations(self._samples, 2) if abs(b - a) >= SPREAD_MIN
        ]
        rates = [time_us / tokens for tokens, time_us in self._samples]  # where all prompts have one length
        slope = median(slopes or rates)
        token_us = min(max(slope, TOKEN_US_MIN), TOKEN_US_MAX)
        rest_us = median(time_us - token_us * tokens for tokens, time_us in self._samples)
        return PrefillCosts(token_us, 0.0, max(0.0, rest_us))
