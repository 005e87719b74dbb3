"""The requests that failed last, for people who look at a server. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

KEPT = 64
"""So many of the server's own failures are kept, and as many wrong requests: a client that sends wrong ones hides no
others.
"""
NAME_CHARACTERS_MAX = 64


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that was refused, or failed. `at` is Unix seconds."""

    at: float
    request_id: str
    operation: str
    bucket: str
    status: int
    code: str


class RecentFailures:
    """Those of one gateway process."""

    def __init__(self) -> None:
        self._own: deque[Failure] = deque(maxlen=KEPT)
        self._wrong: deque[Failure] = deque(maxlen=KEPT)

    def note(self, at: float, request_id: str, operation: str, bucket: str, status: int, code: str) -> None:
        """Keep a failure, and forget the oldest of its kind."""
        most = NAME_CHARACTERS_MAX
        failure = Failure(
            at=at,
            request_id=request_id[:most],
            operation=operation[:most],
            bucket=bucket[:most],
            status=status,
            code=code[:most],
        )
        (self._own if status >= 500 else self._wrong).append(failure)

    def told(self) -> list[dict[str, Any]]:
        """The latest first."""
        return [asdict(each) for each in sorted((*self._own, *self._wrong), key=lambda failure: -failure.at)]
