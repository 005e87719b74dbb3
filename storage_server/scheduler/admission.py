"""Admission: up to a bound every delivery starts at once and unpaced; beyond it callers are told to slow down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from descriptors.errors import ErrorCode, ServerError


@dataclass(frozen=True, slots=True)
class Grant:
    """What a delivery may use: its rate in bytes per second (0: not limited) and the epoch that gave it."""

    rate_bytes_per_s: int = 0
    epoch: int = 0


class Admission:
    """Counts active deliveries. Raises ServerError(SlowDown) beyond `deliveries_max`."""

    def __init__(self, deliveries_max: int) -> None:
        self._deliveries_max = deliveries_max
        self.active_count = 0

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[Grant]:
        """Hold a place while the context lasts."""
        if self.active_count >= self._deliveries_max:
            raise ServerError(
                ErrorCode.SLOW_DOWN, f"{self._deliveries_max} deliveries are active already", retryable=True
            )
        self.active_count += 1
        try:
            yield Grant()
        finally:
            self.active_count -= 1
