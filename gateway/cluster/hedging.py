"""When a slow portion of a delivery is asked of a second member, too, and how many bytes that may cost. Pure.

A portion is slow when it is waited for longer than 99 of 100 portions were lately, in the same step. The second member
has the chunks from home, so whoever is first has the same bytes, and the other is stopped. Over http a portion is
waited for window by window; into a client's memory it is waited for as a whole, and how long is compared by its bytes.
(Dean and Barroso, "The Tail
at Scale", 2013: a hedged request after the 95th percentile; we wait longer, since ours costs a whole portion.)

Example: the last 1,000 windows were waited for 2 ms in the median and 30 ms in the 99th percentile. A window that has
not come after 60 ms, which is LIMIT_FACTOR times that, is asked of another member, if so far at least 100 MB were
delivered for each 3 MB that hedges have cost.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

import numpy as np

from descriptors.units import MIB

QUANTILE = 0.99
LIMIT_FACTOR = 2.0
"""Portions that are just over the quantile come before a second member could bring them."""
LIMIT_S_MIN, LIMIT_S_MAX = 0.02, 1.0
KEPT = 1024
LEAST = 100
"""Waits that must be known before anything counts as slow."""
REFRESHED_EVERY = 32
EXTRA_FRACTION = 0.03
"""Hedges take no more than this fraction of the delivered bytes."""
IN_FLIGHT_BYTES = 1 << 20
"""Bytes of a stopped answer that were on their way besides those that were read: buffers of sockets, and one piece."""


class HedgeStep(Enum):
    """A portion over http is waited for until it begins, and then for its slices of each window; a portion that goes
    into memory as a whole.
    """

    BEGIN = "begin"
    WINDOW = "window"
    PORTION = "portion"


class _Waits:
    """The last waits of one step, in seconds, or in seconds for each MiB."""

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=KEPT)
        self._new_count = 0
        self.limit: float | None = None

    def add(self, wait_s: float) -> None:
        self._kept.append(wait_s)
        self._new_count += 1
        if len(self._kept) >= LEAST and (self.limit is None or self._new_count >= REFRESHED_EVERY):
            self._new_count = 0
            self.limit = LIMIT_FACTOR * float(np.quantile(np.fromiter(self._kept, np.float64), QUANTILE))


class Hedging:
    """The waits of one gateway, and the bytes that its hedges have cost."""

    def __init__(self) -> None:
        self._waits = {step: _Waits() for step in HedgeStep}
        self.delivered_bytes = 0
        self.extra_bytes = 0
        self.hedge_count = 0
        self.won_count = 0

    def limit_s(self, step: HedgeStep, nbytes: int = 0) -> float | None:
        """How long a portion, of so many bytes where it is waited for as a whole, may be waited for before it counts as
        slow; None as long as too little is known.
        """
        limit = self._waits[step].limit
        if limit is None:
            return None
        if step is HedgeStep.PORTION:
            return max(limit * _units(nbytes), LIMIT_S_MIN)
        return min(max(limit, LIMIT_S_MIN), LIMIT_S_MAX)

    def waited(self, step: HedgeStep, wait_s: float, nbytes: int = 0) -> None:
        """Note how long a portion was waited for that came by itself."""
        self._waits[step].add(wait_s / _units(nbytes) if step is HedgeStep.PORTION else wait_s)

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


def _units(nbytes: int) -> float:
    """MiB, and one more for what a portion costs whatever its size."""
    return 1.0 + nbytes / MIB
