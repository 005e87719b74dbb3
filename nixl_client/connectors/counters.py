"""Counters of one connector."""

from __future__ import annotations

import threading


class Counters:
    """Numbers by name, counted since the last `take`, and since the start. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_take: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        """Count on."""
        with self._lock:
            for name, amount in amounts.items():
                self._since_take[name] = self._since_take.get(name, 0) + amount
                self._totals[name] = self._totals.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """The counts since the last call."""
        with self._lock:
            taken, self._since_take = self._since_take, {}
            return taken

    @property
    def totals(self) -> dict[str, float]:
        """The counts since the start."""
        with self._lock:
            return dict(self._totals)
