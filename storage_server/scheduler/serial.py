"""A link that carries one payload after the other, each for as long as it takes. Pure: `now` is an argument.

The choice of who is next is made when the link is free, and the payload is let go when its last byte would have
crossed. A wake-up that comes late is made up for, up to `CATCH_UP_S`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from storage_server.scheduler.flow import Flow

CATCH_UP_S = 0.05


class SerialLink:
    """`choose(now)` names the flow whose next payload is carried, or None; `went(flow, now)` hears of each that has
    crossed, before the next choice.
    """

    def __init__(
        self, rate_bytes_per_s: float, choose: Callable[[float], Flow | None], went: Callable[[Flow, float], None]
    ) -> None:
        self._rate = rate_bytes_per_s
        self._choose = choose
        self._went = went
        self._free_s = -math.inf
        self._carried: Flow | None = None

    def set_rate(self, rate_bytes_per_s: float, now: float) -> None:
        """What is left of the payload on the link goes at the new rate."""
        if self._carried is not None and self._free_s > now:
            self._free_s = now + (self._free_s - now) * self._rate / rate_bytes_per_s
        self._rate = rate_bytes_per_s

    def drop(self, flow: Flow) -> None:
        """The flow is gone; what is on the link of it is not waited for."""
        if self._carried is flow:
            self._carried = None

    def carries(self, flow: Flow) -> bool:
        """Whether the flow's next payload is on the link."""
        return self._carried is flow

    def due(self, now: float, *, makes_up: bool = False) -> list[Flow]:
        """Whose payloads have crossed, in order; the next one is put on the link, and where it `makes_up`, that counts
        from when the link became free.
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
                flow.let_go()
                self._went(flow, now)
            self._carried = self._choose(now)
            if self._carried is None:
                return going
            self._free_s = start_s + self._carried.payload_bytes / self._rate

    def wake_at(self) -> float:
        """When the payload on the link will have crossed; infinity while there is none."""
        return self._free_s if self._carried is not None else math.inf
