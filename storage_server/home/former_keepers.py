"""The copies of former keepers. When the members of a cluster change, keys get other keepers, whose caches do not have
them yet. Such a keeper asks home which object a key shows now, and takes the bytes of exactly that object out of the
former keeper's cache, so that home need not send them again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from descriptors.cluster import MEMBERS_MAX, Member
from descriptors.conditions import ReadCondition
from descriptors.errors import CallerError, ErrorCode, ObjectCacheError, ServerError
from descriptors.objects import RangeSpec, ReadRequest
from descriptors.storage_api import ObjectRead
from objectcache.adapters.breaker import Breaker
from storage_server.delivery.gather.landing import Landed
from storage_server.home.further_tier import FurtherTier
from storage_server.home.rules.remote_entry import RemoteEntry
from storage_server.home.service import HomeObjects

READ_WAIT_S = 1.0
READ_BYTES_PER_S_MIN = 100e6
"""A copy that takes longer than READ_WAIT_S, and its bytes at this rate, comes from home instead."""
PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 60.0
"""A member that could not be asked is left alone for so long."""
MISSES_MAX = 256
"""After so many misses in a row a member seems to have no copies: it is left alone, too."""
FormerKeeper = Callable[[str, str], Member | None]
"""The former keeper of a bucket and key, where it may have a copy."""


class PeerCopies(Protocol):
    """Reads out of the caches of other members."""

    def open_copy(self, member: Member, request: ReadRequest) -> AbstractAsyncContextManager[ObjectRead]:
        """A read of what the member has in its cache. Raises what `open_object` raises, ServerError where the member
        cannot be reached.
        """

    async def close(self) -> None:
        """Close every connection."""


class FormerKeepers(FurtherTier):
    """The caches of the members that kept keys before this one. They keep nothing for others."""

    def __init__(self, objects: HomeObjects, former_keeper: FormerKeeper, copies: PeerCopies) -> None:
        self._objects = objects
        self._former_keeper = former_keeper
        self._copies = copies
        self._breakers: dict[str, Breaker] = {}
        self._misses: dict[str, int] = {}
        self.hit_count = 0
        self.miss_count = 0
        self.read_bytes = 0

    def may_have(self, bucket: str, key: str) -> bool:
        """Whether the key has a former keeper that answers."""
        return self._asked(bucket, key) is not None

    async def read(self, bucket: str, key: str, landed: Landed) -> RemoteEntry | None:
        """Bring a chunk into its memory: the object that home shows now, in the former keeper's copy. None where there
        is none, or not soon enough; then home is asked for all of it. Its bytes are not proved yet.
        """
        member = self._asked(bucket, key)
        if member is None:
            return None
        seen_at, is_asked = time.time(), False
        try:
            async with asyncio.timeout(READ_WAIT_S + len(landed.view) / READ_BYTES_PER_S_MIN):
                entry = await self._shown(bucket, key, seen_at)
                if entry is None or entry.info.nbytes != len(landed.view):
                    return None
                is_asked = True
                await self._read(member, entry, landed.view)
        except (ObjectCacheError, TimeoutError) as error:
            if is_asked:  # what home says is no fault of the member
                is_refusal = isinstance(error, CallerError) and error.code is not ErrorCode.ACCESS_DENIED
                self._missed(member, has_failed=not is_refusal)
            return None
        self.hit_count += 1
        self.read_bytes += entry.info.nbytes
        self._misses[member.id] = 0
        self._breaker(member).succeeded()
        return entry

    def found_wrong(self, bucket: str, key: str) -> None:
        """The bytes of a copy were not those of the object."""
        member = self._former_keeper(bucket, key)
        if member is not None:
            self._missed(member, has_failed=True)

    async def close(self) -> None:
        """Close every connection."""
        await self._copies.close()

    def _asked(self, bucket: str, key: str) -> Member | None:
        member = self._former_keeper(bucket, key)
        is_left_alone = member is None or self._breaker(member).is_open(time.monotonic())
        return None if is_left_alone else member

    async def _shown(self, bucket: str, key: str, seen_at: float) -> RemoteEntry | None:
        """The object that home shows; None where it has no proof, so that nobody else's bytes can be believed."""
        first_byte = ReadRequest(bucket, key, RangeSpec(0, 0))
        async with self._objects.open_range(first_byte) as (head, proof, coming):
            async for _ in coming:
                pass
        return None if proof is None else RemoteEntry(bucket, head.info, proof, seen_at)

    async def _read(self, member: Member, entry: RemoteEntry, view: memoryview) -> None:
        condition = ReadCondition(if_match=(entry.info.etag,))
        request = ReadRequest(entry.bucket, entry.info.key, condition=condition, only_if_cached=True)
        at = 0
        async with self._copies.open_copy(member, request) as read:
            async for piece in read.body:
                if at + len(piece) > len(view):
                    break
                view[at : at + len(piece)] = piece
                at += len(piece)
        if at != len(view):
            raise ServerError(ErrorCode.INTERNAL_ERROR, "a copy of another size came", retryable=True)

    def _missed(self, member: Member, *, has_failed: bool) -> None:
        self.miss_count += 1
        self._misses[member.id] = self._misses.get(member.id, 0) + 1
        if has_failed or self._misses[member.id] >= MISSES_MAX:
            self._breaker(member).failed(time.monotonic())

    def _breaker(self, member: Member) -> Breaker:
        for known in (self._breakers, self._misses):
            if len(known) > MEMBERS_MAX:  # members come and go; the oldest has left
                del known[next(iter(known))]
        return self._breakers.setdefault(member.id, Breaker(1, PAUSE_S_MIN, PAUSE_S_MAX))
