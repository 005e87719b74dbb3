"""Demand: the facts about a layerwise request that the scheduler decides by.

Example: 32 layers of 2 MB, 4 ms of computing each. The request never stalls at 2 MB / 4 ms = 500 MB/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

COMPUTE_S_MAX = 3600.0
"""A stated compute time above this is taken to be this."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One layerwise request: L layers of s bytes, each computed in c seconds; c is None where the client did not say.

    `weight` is the request's part of its tenant's weight. A request of higher `priority` goes first, as far as the
    bounds promised to others allow. `rate_max_bytes_per_s` is the request's part of its tenant's cap; None means no
    cap.
    """

    layer_bytes: int
    layer_count: int
    compute_s: float | None = None
    weight: float = 1.0
    priority: int = 0
    rate_max_bytes_per_s: float | None = None

    @property
    def delivery_bytes(self) -> int:
        """W = L*s."""
        return self.layer_bytes * self.layer_count

    @property
    def stated_compute_s(self) -> float | None:
        """c, between 0 and `COMPUTE_S_MAX`; None where the client stated nothing, or no number."""
        if self.compute_s is None or math.isnan(self.compute_s):
            return None
        return min(max(self.compute_s, 0.0), COMPUTE_S_MAX)
