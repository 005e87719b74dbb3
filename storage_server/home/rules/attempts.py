"""How often one request upstream is tried, and how long it waits in between. Pure."""

from __future__ import annotations

from objectcache.adapters.breaker import back_off_s

ATTEMPTS_MAX = 3
PAUSE_S_MIN, PAUSE_S_MAX = 0.2, 30.0


def pause_before_next_s(attempt: int) -> float:
    """The pause after the failed attempt of this number, from 1."""
    return back_off_s(attempt, PAUSE_S_MIN, PAUSE_S_MAX)
