"""Admission: the bounds on the number of deliveries and on the bytes they have still to send. A caller beyond a bound
is told to slow down, and when to come back.

Example: 900 bytes wait for a link of 100 bytes/s, and at most 1,000 may. A delivery of 300 bytes is refused, because it
exceeds the bound by 200 bytes; its caller is told to come back in 200 / 100 = 2 s. With `deliveries_max` = 8 one access
key may have 4 deliveries.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from descriptors.errors import ErrorCode, ServerError

RETRY_AFTER_S = 1
RETRY_AFTER_S_MAX = 60
TENANT_BOUND_FROM = 4
"""Where `deliveries_max` is less than this, one access key may hold all places."""


class DeliveryAdmission:
    """Counts deliveries, including those that wait for the link. At most `deliveries_max` are admitted. One access key
    may hold half of them, where half is two or more, so that other keys always find a place.
    """

    def __init__(self, deliveries_max: int) -> None:
        self._deliveries_max = deliveries_max
        self._tenant_max = deliveries_max // 2 if deliveries_max >= TENANT_BOUND_FROM else deliveries_max
        self._tenant_counts: Counter[str] = Counter()
        self.active_count = 0

    @asynccontextmanager
    async def admit(self, tenant_name: str = "", retry_after_s: int = RETRY_AFTER_S) -> AsyncIterator[None]:
        """Hold a place while the context lasts. Raises ServerError(SlowDown) where a bound is met. Without a name only
        `deliveries_max` holds.
        """
        if self.active_count >= self._deliveries_max:
            raise _slow_down(f"{self._deliveries_max} deliveries are active already", retry_after_s)
        if tenant_name and self._tenant_counts[tenant_name] >= self._tenant_max:
            message = f"{self._tenant_max} deliveries of this access key are active already, as many as one may have"
            raise _slow_down(message, retry_after_s)
        self.active_count += 1
        if tenant_name:
            self._tenant_counts[tenant_name] += 1
        try:
            yield
        finally:
            self.active_count -= 1
            if tenant_name:
                self._tenant_counts[tenant_name] -= 1
                if not self._tenant_counts[tenant_name]:
                    del self._tenant_counts[tenant_name]


def refuse_backlog(
    queued_bytes: int,
    delivery_bytes: int,
    queued_bytes_max: int,
    link_bytes_per_s: float,
    *,
    whose: str = "",
) -> ServerError | None:
    """SlowDown for a delivery that would make the backlog too large, with the time until enough of it will have been
    sent; None where the delivery may come. A delivery is never refused when nothing is queued. `whose` names the queued
    bytes in the message.
    """
    if not queued_bytes or queued_bytes + delivery_bytes <= queued_bytes_max:
        return None
    excess = min(queued_bytes, queued_bytes + delivery_bytes - queued_bytes_max)
    wait_s = max(RETRY_AFTER_S, min(RETRY_AFTER_S_MAX, math.ceil(excess / link_bytes_per_s)))
    message = f"{queued_bytes} bytes{whose and f' {whose}'} wait for the link already; at most {queued_bytes_max} may"
    return _slow_down(message, wait_s)


def _slow_down(message: str, retry_after_s: int) -> ServerError:
    return ServerError(ErrorCode.SLOW_DOWN, message, retryable=True, retry_after_s=retry_after_s)
