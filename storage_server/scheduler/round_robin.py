"""Weighted deficit round robin: who sends next, so that bytes over time are in proportion to weights. Pure.

In each round a flow's deficit grows in proportion to its weight, and a flow whose deficit covers its next payload sends
it (Shreedhar and Varghese, 1995). Rounds here are as small as can be: who goes next is whose deficit is enough in the
earliest round, and rounds in which nobody sends are skipped. Nothing is saved up by a flow that has nothing to send.
"""

from __future__ import annotations

import heapq

from storage_server.scheduler.flow import Flow


class RoundRobin:
    """The flows that have something to send now."""

    def __init__(self) -> None:
        self._round = 0.0
        self._enough: dict[Flow, float] = {}
        """The round in which each flow's deficit will cover its next payload."""
        self._queue: list[tuple[float, int, Flow]] = []

    def __len__(self) -> int:
        return len(self._enough)

    def add(self, flow: Flow, weight: float) -> None:
        """It has a payload to send; a flow that is here already stays where it is."""
        if flow not in self._enough:
            enough = self._enough[flow] = self._round + flow.payload_bytes / weight
            heapq.heappush(self._queue, (enough, flow.number, flow))

    def remove(self, flow: Flow) -> None:
        """It has nothing to send, or is gone."""
        if self._enough.pop(flow, None) is not None and len(self._queue) > 2 * len(self._enough) + 8:
            self._queue = [entry for entry in self._queue if self._enough.get(entry[2]) == entry[0]]
            heapq.heapify(self._queue)

    def next(self) -> Flow | None:
        """Whose payload goes. Who has another is added again, at once to lose nothing."""
        while self._queue:
            enough, _, flow = heapq.heappop(self._queue)
            if self._enough.get(flow) == enough:
                del self._enough[flow]
                self._round = enough
                return flow
        self._round = 0.0
        return None
