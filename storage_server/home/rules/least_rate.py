"""When a body comes too slowly. Pure: times are arguments.

A service that sends a byte before each time limit of a read ends would otherwise hold a connection, and all that wait
for the chunk, for ever; so would a caller whose body is passed on.
"""

from __future__ import annotations

from descriptors.units import KIB

READ_BYTES_PER_S_MIN = 16 * KIB
"""All connections for chunks together then need a megabyte a second: less than that is no link for KV caches."""


class LeastRate:
    """Adds up the time that somebody has waited for one body, and the bytes that have come meanwhile."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._waited_s = 0.0
        self._nbytes = 0

    def is_too_slow(self, waited_s: float, nbytes: int) -> bool:
        """Note that so many bytes came after so long a wait. Whether fewer than READ_BYTES_PER_S_MIN came in the last
        window, which has ended.
        """
        self._waited_s += waited_s
        self._nbytes += nbytes
        if self._waited_s < self._window_s:
            return False
        is_too_slow = self._nbytes < READ_BYTES_PER_S_MIN * self._waited_s
        self._waited_s, self._nbytes = 0.0, 0
        return is_too_slow
