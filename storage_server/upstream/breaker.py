"""When upstream is asked again after failures. Pure: time is an argument.

closed ── 5 failures in a row ──▶ open (nobody asks) ── 1 s, 2 s, 4 s … 30 s ──▶ one may try
   ▲                                                                              │
   └───────────────── it went well ◀──────────────────────────────────────────────┘
"""

from __future__ import annotations

FAILURES_MAX = 5
PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 30.0
ATTEMPTS_MAX = 3
BACK_OFF_S = 0.1
"""Before the second attempt of one request; twice as long before each further one."""


class Breaker:
    """Counts failures of one service: answers that say it is busy or broken, and no answers."""

    def __init__(self) -> None:
        self._failure_count = 0
        self._pause_s = PAUSE_S_MIN
        self._open_until_s: float | None = None
        self._is_trying = False

    @property
    def is_open(self) -> bool:
        """Whether the service has failed and is not known to be well again."""
        return self._open_until_s is not None

    def wait_s(self, now_s: float) -> float:
        """0 where a request may go now, and then `succeeded` or `failed` follows; else the seconds to wait."""
        if self._open_until_s is None:
            return 0.0
        if now_s < self._open_until_s:
            return self._open_until_s - now_s
        if self._is_trying:
            return self._pause_s
        self._is_trying = True
        return 0.0

    def succeeded(self) -> None:
        """Note an answer, be it a refusal."""
        self._failure_count = 0
        self._pause_s = PAUSE_S_MIN
        self._open_until_s = None
        self._is_trying = False

    def failed(self, now_s: float) -> None:
        """Note a failure."""
        self._failure_count += 1
        if self._open_until_s is not None:
            self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        if self._open_until_s is not None or self._failure_count >= FAILURES_MAX:
            self._open_until_s = now_s + self._pause_s
        self._is_trying = False

    def gave_up(self) -> None:
        """Note that a request ended without telling anything of the service, because its caller left."""
        self._is_trying = False
