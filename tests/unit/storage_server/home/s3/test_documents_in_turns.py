"""Long documents that travel between us and a service are written and read in threads, in turns of callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from objectcache.adapters.caller import CALLER
from objectcache.adapters.threads import computed
from storage_server.home.s3.connection import Upstream
from storage_server.settings import UpstreamSettings
from tests.support.waiting import settled

KEYS = [{"Key": str(number)} for number in range(100)]


class _WrittenError(Exception):
    """The document of a request was written."""


class PlayedUpstream(Upstream):
    """No request leaves it."""

    @asynccontextmanager
    async def _answer(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise _WrittenError
        yield


async def test_nobody_waits_for_another_one_whose_own_turn_is_in_use() -> None:
    """One caller may have many long documents read, each of its requests behind the one before."""
    upstream = PlayedUpstream(UpstreamSettings("http://127.0.0.1:9", "key", "secret"))
    may_end = threading.Event()

    async def busy() -> None:
        CALLER.set("busy")
        await computed(may_end.wait, is_long=True)

    async def deletes(caller: str) -> None:
        CALLER.set(caller)
        await upstream.call("DeleteObjects", Bucket="bucket", Delete={"Objects": KEYS})

    tasks = [asyncio.create_task(busy()), asyncio.create_task(deletes("busy"))]
    try:
        await settled()
        other = asyncio.create_task(deletes("other"))
        await asyncio.wait((other,), timeout=20)
        assert other.done()
        assert not tasks[1].done()
    finally:
        may_end.set()
        await asyncio.wait([*tasks, other])
    for task in (tasks[1], other):
        with pytest.raises(_WrittenError):
            task.result()
