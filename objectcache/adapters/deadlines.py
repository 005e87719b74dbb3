"""Deadlines of a connection: events in, a verdict out. Pure: the caller supplies the time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

HEAD_BYTES_MAX = 64 * 1024
_HEAD_END = b"\r\n\r\n"


class ConnectionVerdict(Enum):
    """The decision about a connection."""

    KEEP = auto()
    HEAD_LATE = auto()
    SEND_STALLED = auto()


class _Phase(Enum):
    IDLE = auto()
    HEAD = auto()
    REQUEST = auto()


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """A connection is closed when a request's head is not complete after `header_timeout_s`, no request came for
    `keepalive_timeout_s`, or the other side took no byte of an answer for `send_idle_timeout_s`. A header has at most
    `header_bytes_max`, and a connection ends behind a request whose head has more. Above `connections_max` idle
    connections and slow bodies end, or new connections are refused.
    """

    header_timeout_s: float = 30.0
    keepalive_timeout_s: float = 75.0
    send_idle_timeout_s: float = 60.0
    connections_max: int = 16_384
    header_bytes_max: int = 16_384


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The seconds that a request's head may take, and those in which a client may take no byte of a queued answer."""

    header_timeout_s: float
    send_idle_timeout_s: float

    @property
    def check_s(self) -> float:
        """The interval of checks in seconds; a deadline is noticed at most this much late."""
        return min(self.header_timeout_s, self.send_idle_timeout_s) / 5


class ConnectionWatch:
    """The deadlines of one connection. Bytes that arrive while a request runs are its body or the next head. Neither is
    timed here, because the body has a limit of its own.
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
        """Note that bytes came. False when they make the head of a request too large."""
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

    def verdict(self, unsent_bytes: int, now_s: float) -> ConnectionVerdict:
        """The verdict now. `unsent_bytes` are queued for the client; while the number stays the same, it takes none."""
        if unsent_bytes == 0 or unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since_s = unsent_bytes, now_s
        elif now_s - self._unsent_since_s >= self._deadlines.send_idle_timeout_s:
            return ConnectionVerdict.SEND_STALLED
        if self._phase is _Phase.HEAD and now_s - self._head_since_s >= self._deadlines.header_timeout_s:
            return ConnectionVerdict.HEAD_LATE
        return ConnectionVerdict.KEEP
