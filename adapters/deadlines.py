"""When a connection has waited long enough: events in, a verdict out. Pure: the caller supplies the time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

HEAD_BYTES_MAX = 64 * 1024
_HEAD_END = b"\r\n\r\n"


class Verdict(Enum):
    """What to do with a connection."""

    KEEP = auto()
    HEAD_LATE = auto()
    SEND_STALLED = auto()


class _Phase(Enum):
    IDLE = auto()
    HEAD = auto()
    REQUEST = auto()


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds a request's head may take, and seconds a client may take no byte of what is queued for it."""

    header_timeout_s: float
    send_idle_timeout_s: float

    @property
    def check_s(self) -> float:
        """How often to ask; a deadline is noticed this much late at most."""
        return min(self.header_timeout_s, self.send_idle_timeout_s) / 5


class ConnectionWatch:
    """One connection's waiting. Bytes that arrive while a request runs are its body or the next head; neither is timed
    here, since the body has its own limit.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._phase = _Phase.IDLE
        self._head_since_s = 0.0
        self._head_bytes = 0
        self._tail = b""
        self._unsent_bytes = 0
        self._unsent_since_s = 0.0

    def received(self, data: bytes, now_s: float) -> bool:
        """Bytes came. False when they make the head of a request too large to go on with."""
        if self._phase is _Phase.REQUEST or not data:
            return True
        if self._phase is _Phase.IDLE:
            self._phase, self._head_since_s, self._head_bytes, self._tail = _Phase.HEAD, now_s, 0, b""
        seen = self._tail + data[: HEAD_BYTES_MAX + len(_HEAD_END)]
        end = seen.find(_HEAD_END)
        if end >= 0:
            self._head_bytes += end - len(self._tail)
            self._phase = _Phase.REQUEST
        else:
            self._head_bytes += len(data)
            self._tail = seen[1 - len(_HEAD_END) :]
        return self._head_bytes <= HEAD_BYTES_MAX

    def request_begun(self) -> None:
        self._phase = _Phase.REQUEST

    def request_ended(self) -> None:
        self._phase = _Phase.IDLE

    def verdict(self, unsent_bytes: int, now_s: float) -> Verdict:
        """`unsent_bytes` are queued for the client now; while that number stays the same, it takes none."""
        if unsent_bytes == 0 or unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since_s = unsent_bytes, now_s
        elif now_s - self._unsent_since_s >= self._deadlines.send_idle_timeout_s:
            return Verdict.SEND_STALLED
        if self._phase is _Phase.HEAD and now_s - self._head_since_s >= self._deadlines.header_timeout_s:
            return Verdict.HEAD_LATE
        return Verdict.KEEP
