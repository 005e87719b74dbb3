"""What the scheduler knows of a layerwise request."""

from __future__ import annotations

import math
from dataclasses import dataclass

COMPUTE_S_MAX = 3600.0
"""No layer is believed to be computed for longer."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One layerwise request: L layers of s bytes, each computed in c seconds; None where nobody said.

    `weight` is its part of its tenant's weight. Higher `priority` goes first, within what the bounds for the others
    allow. `rate_max_bytes_per_s` is what its tenant may still use; None is no limit.
    """

    layer_bytes: int
    layer_count: int
    compute_s: float | None = None
    weight: float = 1.0
    priority: int = 0
    rate_max_bytes_per_s: float | None = None

    @property
    def payload_bytes(self) -> int:
        """W = L*s."""
        return self.layer_bytes * self.layer_count

    @property
    def stated_compute_s(self) -> float | None:
        """c, between 0 and `COMPUTE_S_MAX`; None where nothing was said that is a number."""
        if self.compute_s is None or math.isnan(self.compute_s):
            return None
        return min(max(self.compute_s, 0.0), COMPUTE_S_MAX)
