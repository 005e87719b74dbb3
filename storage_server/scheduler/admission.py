"""Admission: how many deliveries there may be, and how much they may still have to send. Beyond that callers are told
to slow down, and when to come back.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from descriptors.errors import ErrorCode, ServerError

RETRY_AFTER_S_MAX = 60


class Admission:
    """Counts deliveries, those that wait for the link included; beyond `deliveries_max`: ServerError(SlowDown)."""

    def __init__(self, deliveries_max: int) -> None:
        self._deliveries_max = deliveries_max
        self.active_count = 0

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Hold a place while the context lasts."""
        if self.active_count >= self._deliveries_max:
            raise ServerError(
                ErrorCode.SLOW_DOWN, f"{self._deliveries_max} deliveries are active already", retryable=True
            )
        self.active_count += 1
        try:
            yield
        finally:
            self.active_count -= 1


def refuse_backlog(
    queued_bytes: int, payload_bytes: int, queued_bytes_max: int, link_bytes_per_s: float
) -> ServerError | None:
    """The answer to a delivery that would make the backlog too large: SlowDown, with when enough will have gone. One
    that nothing is ahead of is never refused.
    """
    if not queued_bytes or queued_bytes + payload_bytes <= queued_bytes_max:
        return None
    excess = min(queued_bytes, queued_bytes + payload_bytes - queued_bytes_max)
    wait_s = max(1, min(RETRY_AFTER_S_MAX, math.ceil(excess / link_bytes_per_s)))
    message = f"{queued_bytes} bytes wait for the link already; at most {queued_bytes_max} may"
    return ServerError(ErrorCode.SLOW_DOWN, message, retryable=True, retry_after_s=wait_s)
