"""Targets: the limit of a figure, and whether the figure keeps it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from calibration.samples import Spread


class Side(Enum):
    """On which side of its limit a value has to be."""

    AT_LEAST = "at least"
    MORE_THAN = "more than"
    AT_MOST = "at most"


@dataclass(frozen=True, slots=True)
class Target:
    """A limit from the issue of this project, and the worst of the cases that it speaks of. `value` is None, with the
    `reason`, where nothing was measured; `rounds` has the extremes where it is the median of rounds.
    """

    what: str
    limit: float
    value: float | None
    side: Side = Side.AT_LEAST
    rounds: Spread | None = None
    case: str | None = None
    ours: str | None = None
    reason: str | None = None

    @property
    def is_met(self) -> bool | None:
        """None where nothing was measured."""
        if self.value is None:
            return None
        if self.side is Side.AT_MOST:
            return self.value <= self.limit
        return self.value > self.limit or (self.side is Side.AT_LEAST and self.value == self.limit)

    def json(self, limit_name: str = "limit") -> dict[str, Any]:
        """Plain values, the limit under a name of the result's own."""
        return {"what": self.what, limit_name: self.limit, "value": self.value, "is_met": self.is_met}
