"""ObjectPaths over played requests: the bound on the wait for the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from descriptors.errors import ServerError
from nixl_client.objects import ObjectPaths, Registered
from nixl_client.session.agent import ClientAgent
from nixl_client.session.signed_http import SignedHttp
from nixl_client.transports.http import UnansweredError
from tests.support.chunks import LAYOUT
from tests.support.played_http import PlayedHttp

BUFFER = np.zeros(LAYOUT.delivery_bytes(1), np.uint8)


class SilentHttp(PlayedHttp):
    """Answers no request, and knows how long each one would have waited. The stop of a request is answered."""

    def __init__(self) -> None:
        super().__init__(attempts_max=1)
        self.waits: list[float | None] = []

    def request_once(
        self,
        method: str,
        path: str,
        query: object = None,
        body: object = b"",
        timeout_s: float | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        if method != "DELETE":
            self.waits.append(timeout_s)
            raise UnansweredError("silence")

    def stream(self, *_: Any, timeout_s: float | None = None, **__: Any) -> None:
        self.waits.append(timeout_s)
        raise UnansweredError("silence")


class PlayedAgent:
    """An agent that the server knows."""

    @property
    def receiver(self) -> PlayedAgent:
        return self

    def agent_id(self) -> str:
        return "a" * 32

    def listen(self, *_: object) -> None:
        """Nobody calls."""

    stop_listening = listen


CALLS: dict[str, Callable[..., object]] = {
    "get tcp": lambda paths, **bound: paths.get_object("k", BUFFER, path="tcp", **bound),
    "get buffer": lambda paths, **bound: paths.get_object("k", BUFFER, path="buffer", **bound),
    "get direct": lambda paths, **bound: paths.get_object("k", BUFFER, **bound),
    "put tcp": lambda paths, **bound: paths.put_object("k", BUFFER, path="tcp", **bound),
    "put direct": lambda paths, **bound: paths.put_object("k", BUFFER, **bound),
    "put chunks": lambda paths, **bound: paths.put_chunks(["k"], LAYOUT, BUFFER, **bound),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_call_bounds_its_wait(call: Callable[..., object]) -> None:
    """By its own bound, or by the one of all calls."""
    http = SilentHttp()
    registered = Registered(cast(ClientAgent, PlayedAgent()), "b" * 32)
    paths = ObjectPaths(cast(SignedHttp, http), "bucket", lambda _: registered, 600.0)
    for bound in ({}, {"timeout_s": 0.25}):
        with pytest.raises(ServerError):
            call(paths, **bound)
    assert http.waits == [600.0, 0.25]
