"""Objects in the cache that are compared with those at home."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from descriptors.errors import CallerError, ErrorCode, ServerError
from descriptors.objects import ReadRequest
from objectcache.adapters.caller import CALLER
from storage_server.home.comparisons import COMPARED_EACH_MAX, COMPARED_MAX, Comparisons
from tests.support.waiting import settled

MANY = {f"object-{number}": "etag" for number in range(10 * COMPARED_MAX)}


class Home:
    """A home whose objects have these ETags. What `slow` asks waits until `goes_on`, and then `fault` is raised."""

    def __init__(self, etags: dict[str, str]) -> None:
        self._etags = etags
        self.goes_on = asyncio.Event()
        self.asked = 0
        self.fault: Exception | None = None

    async def head_object(self, access_key: str, request: ReadRequest) -> Any:
        self.asked += 1
        if CALLER.get() == "slow":
            await self.goes_on.wait()
        if self.fault is not None:
            raise self.fault
        if request.key not in self._etags:
            raise CallerError(ErrorCode.NO_SUCH_KEY, "there is none")
        return SimpleNamespace(info=SimpleNamespace(etag=self._etags[request.key]))


def made(home: Home) -> Comparisons:
    there: Any = home
    return Comparisons(there)


async def test_what_is_another_object_at_home_or_none_is_stale() -> None:
    comparisons = made(Home({**MANY, "other": "new"}))
    assert await comparisons.stale("bucket", {**MANY, "other": "old", "gone": "etag"}) == {"other", "gone"}
    assert await comparisons.stale("bucket", {}) == set()


async def test_slow_comparisons_of_one_caller_keep_no_other_one_waiting() -> None:
    """All callers stood in one line, in which one had thousands of objects whose answers took half a minute each."""
    home = Home(MANY)
    comparisons = made(home)
    CALLER.set("slow")
    slow = [asyncio.create_task(comparisons.stale("bucket", MANY)) for _ in range(8)]
    await settled()
    assert home.asked == COMPARED_EACH_MAX
    CALLER.set("quick")
    assert await comparisons.stale("bucket", MANY) == set()
    home.goes_on.set()
    assert await asyncio.gather(*slow) == [set()] * 8


async def test_where_one_cannot_be_compared_no_other_one_is() -> None:
    """The request has failed, and what it left behind would keep others waiting."""
    home = Home(MANY)
    comparisons = made(home)
    home.fault = ServerError(ErrorCode.SLOW_DOWN, "it is busy", retryable=True)
    before = asyncio.all_tasks()
    with pytest.raises(ServerError, match="it is busy"):
        await comparisons.stale("bucket", MANY)
    assert home.asked <= COMPARED_EACH_MAX
    assert asyncio.all_tasks() == before
