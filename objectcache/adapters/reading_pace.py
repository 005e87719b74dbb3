"""ReadingPace: whether a client reads its answer fast enough. Pure: the caller measures.

Only time in which the server waits for the client counts, and only bytes that the client has acknowledged. A full
socket buffer does not count against a client that reads slowly but steadily.
"""

from __future__ import annotations

from descriptors.storage_api import Patience


class ReadingPace:
    """The pace of one answer's reader. With a least rate of 0 one byte is enough."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._waited_s = 0.0
        self._taken_bytes = 0

    @property
    def check_s(self) -> float:
        """The interval of checks in seconds, while the client is waited for."""
        return self._patience.window_s / 8

    def is_too_slow(self, waited_s: float, taken_bytes: int) -> bool:
        """Count the seconds waited and the bytes taken since the last call; whether the client is too slow by now."""
        self._waited_s += waited_s
        self._taken_bytes += taken_bytes
        if self._waited_s < self._patience.window_s:
            return False
        least_bytes = max(1.0, self._patience.least_bytes_per_s * self._waited_s)
        is_slow = self._taken_bytes < least_bytes
        self._waited_s, self._taken_bytes = 0.0, 0
        return is_slow
