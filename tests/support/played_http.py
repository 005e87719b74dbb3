"""Requests of a client that a test plays: no server, no wait, no chance."""

from __future__ import annotations

from typing import Any

from nixl_client.session import retries
from nixl_client.session.retries import ATTEMPTS_MAX, Retries


class PlayedClock:
    """A clock that only waits move, and the waits that were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waits: list[float] = []

    def now(self) -> float:
        return self.now_s

    def wait(self, wait_s: float) -> None:
        self.waits.append(wait_s)
        self.now_s += wait_s


class PlayedHttp:
    """In place of a SignedHttp: `request_once` is the test's own, and is repeated as a client's requests are."""

    def __init__(self, attempts_max: int = ATTEMPTS_MAX) -> None:
        self.clock = PlayedClock()
        self.timeout_s = 60.0
        self.retries = Retries(attempts_max, self.clock.now, self.clock.wait, lambda: 0.5)

    def request_once(self, method: str, path: str, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    def request(
        self,
        method: str,
        path: str,
        query: Any = None,
        body: Any = b"",
        timeout_s: float | None = None,
        headers: Any = None,
        may_repeat: Any = retries.always,
    ) -> Any:
        return self.retries.run(
            lambda left_s: self.request_once(method, path, query, body, left_s, headers=headers),
            timeout_s or self.timeout_s,
            may_repeat,
        )
