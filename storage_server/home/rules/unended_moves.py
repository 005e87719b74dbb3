"""Whether bytes may still move between Mooncake and this server's memory when a call has ended. Pure.

Mooncake's client waits 60 s for a transfer, and tells an error then. But its connection goes on for as long as bytes
come now and then. So those of an owner that is slow, or that hangs now and then, come into memory that others have by
that time (seen with Mooncake 0.3.13 over TCP). Refused connections and wrong sizes are told sooner, and move nothing.
"""

from __future__ import annotations

NOT_FOUND, NOT_READY, NO_ROOM = -704, -703, -200
NOTHING_MOVED = frozenset({NOT_FOUND, NOT_READY, NO_ROOM})
FAILED = -1
"""For a call that was not answered with a code."""
QUICK_S = 5.0
"""An error in less time says that nothing moves any more."""


def may_move_on(code: int, took_s: float) -> bool:
    """Whether the call that ended with this code, after so long, may still have bytes under way."""
    return code < 0 and code not in NOTHING_MOVED and took_s >= QUICK_S
