"""When a slow portion of a delivery is asked of a second member, too, and how many bytes that may cost. Pure.

A portion is slow when it is waited for longer than 99 of 100 portions were lately, in the same step. The second member
has the chunks from home, so whoever is first has the same bytes, and the other is stopped. (Dean and Barroso, "The Tail
at Scale", 2013: a hedged request after the 95th percentile; we wait longer, since ours costs a whole portion.)

Example: the last 1,000 windows were waited for 2 ms in the median and 30 ms in the 99th percentile. A window that has
not come after 60 ms, which is LIMIT_FACTOR times that, is asked of another member, if so far at least 100 MB were
delivered for each 3 MB that hedges have cost.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

import numpy as np

QUANTILE = 0.99
LIMIT_FACTOR = 2.0
"""Portions that are just over the quantile come before a second member could bring them."""
LIMIT_S_MIN, LIMIT_S_MAX = 0.02, 1.0
KEPT = 1024
LEAST = 100
"""Waits that must be known before anything counts as slow."""
REFRESHED_EVERY = 32
EXTRA_FRACTION = 0.03
"""Of the delivered bytes, for hedges."""
IN_FLIGHT_BYTES = 1 << 20
"""Bytes of a stopped answer that were on their way besides those that were read: buffers of sockets, and one piece."""


class Step(Enum):
    """A portion is waited for until it begins, and then for its slices of each window."""

    BEGIN = "begin"
    WINDOW = "window"


class _Waits:
    """The last waits of one step, in seconds."""

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=KEPT)
        self._new_count = 0
        self.limit_s: float | None = None

    def add(self, wait_s: float) -> None:
        self._kept.append(wait_s)
        self._new_count += 1
        if len(self._kept) >= LEAST and (self.limit_s is None or self._new_count >= REFRESHED_EVERY):
            self._new_count = 0
            seen_s = LIMIT_FACTOR * float(np.quantile(np.fromiter(self._kept, np.float64), QUANTILE))
            self.limit_s = min(max(seen_s, LIMIT_S_MIN), LIMIT_S_MAX)


class Hedging:
    """The waits of one gateway, and the bytes that its hedges have cost."""

    def __init__(self) -> None:
        self._waits = {step: _Waits() for step in Step}
        self.delivered_bytes = 0
        self.extra_bytes = 0
        self.hedge_count = 0
        self.won_count = 0

    def limit_s(self, step: Step) -> float | None:
        """How long a portion may be waited for before it counts as slow; None as long as too little is known."""
        return self._waits[step].limit_s

    def waited(self, step: Step, wait_s: float) -> None:
        """Note how long a portion was waited for that came by itself."""
        self._waits[step].add(wait_s)

    def delivered(self, nbytes: int) -> None:
        """Note bytes that a client was sent."""
        self.delivered_bytes += nbytes

    def begin(self, nbytes: int) -> bool:
        """Whether a hedge for these bytes may begin; if so it is counted, with what else comes before it is stopped."""
        cost_bytes = nbytes + IN_FLIGHT_BYTES
        if self.extra_bytes + cost_bytes > EXTRA_FRACTION * self.delivered_bytes:
            return False
        self.extra_bytes += cost_bytes
        self.hedge_count += 1
        return True

    def won(self) -> None:
        """Note that the second member was first."""
        self.won_count += 1
