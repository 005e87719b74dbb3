"""The tags of chunks that were fetched from a service that does not count tags."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from descriptors.objects import ReadRequest
from descriptors.storage_api import SERVER_KEY
from objectcache.adapters.caller import CALLER
from storage_server.home.key_locks import KeyLocks
from storage_server.home.s3.copied_tags import CopiedTags
from tests.support.waiting import until


class Home:
    """A home whose objects have no tags."""

    counts_tags = False

    def __init__(self) -> None:
        self.callers: list[str] = []

    async def head_object(self, access_key: str, request: ReadRequest) -> Any:
        self.callers.append(CALLER.get())
        return SimpleNamespace(info=SimpleNamespace(etag="etag", attributes=SimpleNamespace(tags={})))


async def test_tags_are_read_for_the_server_itself() -> None:
    """Else the pins of all would wait for the slow requests of the one whose chunk came first."""
    home, nothing = Home(), SimpleNamespace()
    there: Any = home
    cache: Any = nothing
    tags = CopiedTags(there, cache, KeyLocks())
    CALLER.set("first")
    tags.note("bucket", "chunk", "etag")
    await until(lambda: len(home.callers) == 1)
    assert home.callers == [SERVER_KEY]
    assert CALLER.get() == "first"
    await tags.close()
