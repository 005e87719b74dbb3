"""Comparisons of objects in the cache with those at home: whether the home still has the object of an ETag."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import ReadRequest
from descriptors.storage_api import SERVER_KEY
from objectcache.adapters.caller import CallerTurns
from storage_server.home.service import HomeObjects

COMPARED_MAX, COMPARED_EACH_MAX = 64, 32
"""So many objects are compared at once, and so many of one caller, whose requests may wait for each other."""


class Comparisons:
    """Asks `objects`, in turns of callers. Each object is a request."""

    def __init__(self, objects: HomeObjects) -> None:
        self._objects = objects
        self._turns = CallerTurns(COMPARED_MAX, COMPARED_EACH_MAX)

    async def stale(self, bucket: str, etags: Mapping[str, str]) -> set[str]:
        """The keys that show other objects at home than those of these ETags, or none. Raises what the home says of the
        first one that cannot be compared; the others are not compared then.
        """
        found, left = set[str](), iter(etags.items())

        async def compare() -> None:
            for key, etag in left:
                if not await self.is_current(bucket, key, etag):
                    found.add(key)

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(COMPARED_EACH_MAX, len(etags))):
                    tasks.create_task(compare())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return found

    async def is_current(self, bucket: str, key: str, etag: str) -> bool:
        """Whether the key shows the object of this ETag at home."""
        try:
            async with self._turns.turn():
                head = await self._objects.head_object(SERVER_KEY, ReadRequest(bucket, key))
        except CallerError as error:
            if error.code is not ErrorCode.NO_SUCH_KEY:
                raise
            return False
        return head.info.etag == etag
