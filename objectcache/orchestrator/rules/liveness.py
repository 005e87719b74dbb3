"""Whether an engine may be sent requests: what probes and requests told of it, and an operator's wish.

    UP ── failures ──▶ EJECTED ── its time is over ──▶ HALF_OPEN ── one success ──▶ UP
                           ▲                               │
                           └────────── one failure ────────┘           DRAINING: no new requests, by wish

An engine begins HALF_OPEN: it takes requests only after its first good probe. Each ejection lasts twice as long as the
one before, up to EJECTED_S_MAX, until the engine has been UP for a while. Probes go on meanwhile. An engine that was
down, because a probe or a connection failed, is UP again with the first good probe; one that is well and whose requests
failed stays ejected for its time. Requests alone do not eject an engine that is needed, since no other one takes its
requests: a client may send requests at which any engine ends the connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FAILURES_MAX = 3
"""Failures in a row that eject an engine."""
EJECTED_S, EJECTED_S_MAX = 2.0, 30.0
FORGIVEN_S = 60.0


class EngineStatus(Enum):
    """The states above."""

    UP = "up"
    EJECTED = "ejected"
    HALF_OPEN = "half_open"
    DRAINING = "draining"


@dataclass(slots=True)
class Liveness:
    """All that is known of one engine. Times are seconds of a steady clock."""

    failures: int = 0
    is_draining: bool = False
    is_proved: bool = False
    is_down: bool = False
    """Whether it was ejected because it could not be reached, or was not well."""
    ejected_until_s: float = 0.0
    ejected_s: float = 0.0
    up_since_s: float = 0.0
    last_error: str = ""

    def status(self, now_s: float) -> EngineStatus:
        """The state now."""
        if self.is_draining:
            return EngineStatus.DRAINING
        if self.is_ejected(now_s):
            return EngineStatus.EJECTED
        return EngineStatus.UP if self.is_proved else EngineStatus.HALF_OPEN

    def is_ejected(self, now_s: float) -> bool:
        """Whether it has failed, also one that is draining: the requests that it has go elsewhere."""
        return now_s < self.ejected_until_s

    def takes_requests(self, now_s: float) -> bool:
        """Whether it may be sent requests."""
        return self.status(now_s) is EngineStatus.UP

    def succeeded(self, now_s: float) -> None:
        """A probe or a request went well. A request that was begun before an ejection proves nothing."""
        if now_s < self.ejected_until_s:
            return
        if not self.is_proved:
            self.up_since_s = now_s
        self.is_proved = True
        self.failures = 0
        self.last_error = ""
        if now_s - self.up_since_s >= FORGIVEN_S:
            self.ejected_s = 0.0

    def revived(self, now_s: float) -> None:
        """A probe that began within an ejection went well."""
        if self.is_down:
            self.ejected_until_s = min(self.ejected_until_s, now_s)

    def failed(
        self, now_s: float, error: str, *, is_certain: bool = False, is_probe: bool = False, is_needed: bool = False
    ) -> None:
        """A probe or a request failed. A refused connection `is_certain`: it ejects the engine at once. A request does
        not eject an engine that `is_needed`.
        """
        self.last_error = error[:500]
        self.failures += 1
        if now_s < self.ejected_until_s or (is_needed and not is_certain and not is_probe):
            return
        if is_certain or not self.is_proved or self.failures >= FAILURES_MAX:
            self.is_proved = False
            self.is_down = is_certain or is_probe
            self.failures = 0
            self.ejected_s = min(max(EJECTED_S, 2 * self.ejected_s), EJECTED_S_MAX)
            self.ejected_until_s = now_s + self.ejected_s

    def drain(self, *, is_wanted: bool) -> None:
        """Send it no new requests, or send them again."""
        self.is_draining = is_wanted
