"""Requests to a service, and those of the server's own that try before them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from descriptors.errors import ObjectCacheError, ServerError
from objectcache.adapters.caller import CALLER
from storage_server.home.rules.refusals import NoConnectionError, refusal
from storage_server.home.s3 import connection
from storage_server.home.s3.connection import Upstream
from storage_server.home.s3.sent_body import SentBody
from storage_server.settings import UpstreamSettings
from tests.support.chunks import BytesBody


class Played:
    """The requests of a service that is played: each target that was asked for, and the error for the next ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connection, "FAILURES_MAX", 1)
        monkeypatch.setattr(connection, "PAUSE_S_MAX", 0.0)
        self.upstream = Upstream(UpstreamSettings("http://service", "key", "secret"))
        self.targets: list[str] = []
        self.errors: dict[str, ObjectCacheError] = {}
        """By the targets that they are for; those of `` are for all."""
        monkeypatch.setattr(self.upstream, "_request", self._request)

    async def _request(self, method: str, target: str, *_: object) -> Any:
        self.targets.append(target)
        error = self.errors.get(target) or self.errors.get("")
        if error is not None:
            raise error
        return nullcontext()

    async def delete(self, bucket: str) -> None:
        await self.upstream._tried("DELETE", f"/{bucket}/k", None, lambda: self._request("DELETE", f"/{bucket}/k"))

    async def put(self, bucket: str) -> None:
        body = SentBody(BytesBody(b"bytes"), 5, None)
        await self.upstream._tried("PUT", f"/{bucket}/k", body, lambda: self._request("PUT", f"/{bucket}/k"))


async def test_a_service_that_nobody_can_connect_to_is_tried_by_a_request_of_the_servers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request of a caller might have no answer for as long as it likes, and everybody would wait for it."""
    played = Played(monkeypatch)
    played.errors[""] = NoConnectionError("refused")
    for caller, bucket in (("first", "a"), ("second", "b")):
        CALLER.set(caller)
        with pytest.raises(ServerError, match="cannot be reached"):
            await played.delete(bucket)
    assert played.targets == ["/a/k", "/"]
    played.errors.clear()
    await played.delete("b")
    await played.delete("b")
    assert played.targets == ["/a/k", "/", "/", "/b/k", "/b/k"]


async def test_a_service_that_is_busy_can_be_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    played.errors["/a/k"] = NoConnectionError("refused")
    with pytest.raises(ServerError):
        await played.delete("a")
    played.errors["/"] = refusal(503, b"")
    await played.delete("b")
    assert played.targets == ["/a/k", "/", "/b/k"]


async def test_before_a_body_a_request_of_the_servers_own_tries_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender decides how long a body takes, and others of the bucket wait for the try."""
    played = Played(monkeypatch)
    played.errors["/a/k"] = refusal(503, b"")
    with pytest.raises(ServerError):
        await played.put("a")
    played.errors = {"/a": refusal(503, b"")}
    with pytest.raises(ServerError):
        await played.put("a")
    assert played.targets == ["/a/k", "/a"]
    played.errors.clear()
    await played.put("a")
    assert played.targets == ["/a/k", "/a", "/a", "/a/k"]
