"""A link that carries one payload after the other, each for payload_bytes / rate seconds. Pure: `now` is an argument.

The next flow is chosen when the link is free, and its payload is dispatched when its last byte would have crossed. A
wake-up that comes late is made up for, up to `CATCH_UP_S`.

Example: a link of 100 bytes/s, and at 0 s payloads of 50 and 20 bytes wait. The first is dispatched at 0.5 s, the
second at 0.7 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from storage_server.delivery.scheduler.flow import Flow

CATCH_UP_S = 0.05


class SerialLink:
    """`choose(now)` returns the flow whose next payload is carried, or None. `on_crossed(flow, now)` is called for each
    payload that has crossed, before the next choice.
    """

    def __init__(
        self, rate_bytes_per_s: float, choose: Callable[[float], Flow | None], on_crossed: Callable[[Flow, float], None]
    ) -> None:
        self._rate = rate_bytes_per_s
        self._choose = choose
        self._on_crossed = on_crossed
        self._free_s = -math.inf
        self._carried: Flow | None = None

    def set_rate(self, rate_bytes_per_s: float, now: float) -> None:
        """Set the rate. The rest of the payload on the link goes at the new rate."""
        if self._carried is not None and self._free_s > now:
            self._free_s = now + (self._free_s - now) * self._rate / rate_bytes_per_s
        self._rate = rate_bytes_per_s

    def drop(self, flow: Flow) -> None:
        """Stop carrying the flow's payload, because the flow is gone."""
        if self._carried is flow:
            self._carried = None

    def carries(self, flow: Flow) -> bool:
        """Whether the flow's next payload is on the link."""
        return self._carried is flow

    def due(self, now: float, *, makes_up: bool = False) -> list[Flow]:
        """The flows whose payloads have crossed, in order. The next payload is put on the link; with `makes_up` it
        counts as begun when the link became free, up to `CATCH_UP_S` ago.
        """
        going: list[Flow] = []
        start_s = max(self._free_s, now - CATCH_UP_S) if makes_up and self._free_s < now else now
        while True:
            if self._carried is not None:
                if self._free_s > now:
                    return going
                start_s = max(self._free_s, now - CATCH_UP_S)
                flow, self._carried = self._carried, None
                going.append(flow)
                flow.dispatch()
                self._on_crossed(flow, now)
            self._carried = self._choose(now)
            if self._carried is None:
                return going
            self._free_s = start_s + self._carried.payload_bytes / self._rate

    def wake_at(self) -> float:
        """The time at which the payload on the link will have crossed; infinity while there is none."""
        return self._free_s if self._carried is not None else math.inf
