"""Reads of the store: objects, listings and prefixes. They need only the index and the files, so any process may do
them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial

from descriptors.conditions import check_read
from descriptors.errors import CallerError, ErrorCode
from descriptors.lifecycle import LifecycleRule, expiry
from descriptors.objects import (
    BUCKETS_LISTED_MAX,
    BucketInfo,
    ByteRange,
    ListPage,
    ListRequest,
    ObjectInfo,
    ObjectPart,
    ReadHead,
    ReadRequest,
)
from descriptors.storage_api import ObjectRead
from descriptors.units import GIB
from objectcache.adapters.caller import work_for
from storage_server.kernel.data.bodies import BodyReader
from storage_server.kernel.data.extents import ExtentFiles
from storage_server.kernel.index import queries, transaction
from storage_server.kernel.index.reader import IndexReader, pinned
from storage_server.kernel.index.resolved import ResolvedKeys
from storage_server.kernel.prefix_reads import CHECKSUMS_HERE_BYTES, PrefixReads
from storage_server.kernel.rules.damaged import DamagedObjects
from storage_server.kernel.rules.listing import list_page
from storage_server.kernel.rules.reading import resolve_range
from storage_server.kernel.rules.rows import StoredObject
from storage_server.kernel.shared_room import SharedRoom
from storage_server.kernel.slow_readers import SlowReaders
from storage_server.kernel.watcher import Watcher
from storage_server.planning.block_checksums import checksum_bytes
from storage_server.planning.extent import Extent

RulesOf = Callable[[sqlite3.Connection, str], list[LifecycleRule] | None]
EXTENTS_HERE = 256
"""An object of 10,000 parts takes tens of milliseconds."""
CHECKSUMS_BYTES_MAX = 1 * GIB
"""The checksums of all that is being read; one caller has a quarter: enough for a delivery of 512 GiB, which has them
twice.
"""


class Reads:
    """The calls of the ObjectsApi that only read; `prefixes` reads the chunks of descriptors."""

    def __init__(
        self,
        index: IndexReader,
        files: ExtentFiles,
        bodies: BodyReader,
        resolved: ResolvedKeys | None,
        watcher: Watcher | None = None,
        readers: SlowReaders | None = None,
    ) -> None:
        self._index = index
        self._files = files
        self._bodies = bodies
        self._watcher = watcher or Watcher()
        self._readers = readers or SlowReaders(lambda: None, lambda: False, files.withheld_bytes)
        problem = "too much is being read: the checksums of all of it find no room in memory"
        self._checksums = SharedRoom(CHECKSUMS_BYTES_MAX, CHECKSUMS_BYTES_MAX // 4, problem)
        self.damaged = DamagedObjects()
        self.prefixes = PrefixReads(
            index=index,
            files=files,
            resolved=resolved,
            watcher=self._watcher,
            checksums=self._checksums,
            damaged=self.damaged,
        )

    async def head_bucket(self, access_key: str, bucket: str) -> BucketInfo:
        return self._index.here(lambda db: queries.bucket(db, bucket))

    async def list_buckets(self, access_key: str, after: str = "", most: int = BUCKETS_LISTED_MAX) -> list[BucketInfo]:
        work_for(access_key)
        return await self._index.threaded(partial(queries.buckets, after=after, most=most))

    async def get_lifecycle(self, access_key: str, bucket: str) -> list[LifecycleRule]:
        work_for(access_key)
        rules = self._index.here(lambda db: queries.short_lifecycle(db, bucket))
        return await self._index.threaded(lambda db: queries.lifecycle(db, bucket)) if rules is None else rules

    async def own_lifecycle(self, access_key: str, bucket: str) -> list[LifecycleRule]:
        return await self.get_lifecycle(access_key, bucket)

    async def head_object(self, access_key: str, request: ReadRequest) -> ReadHead:
        work_for(access_key)
        head, _ = await self._find_read(request, extents_max=0)
        return head

    async def _find_read(
        self, request: ReadRequest, *, extents_max: int | None
    ) -> tuple[ReadHead, list[Extent] | None]:
        """Where the bucket has many lifecycle rules, they are read and compared in a thread: the owner of a bucket may
        write a megabyte of them, which takes tens of milliseconds.
        """
        find = partial(_find_read, request=request, extents_max=extents_max)
        if extents_max is not None:
            found = self._index.here(partial(find, rules_of=queries.short_lifecycle))
            if found is not None:
                return found
        found = await self._index.threaded(partial(find, rules_of=queries.lifecycle))
        assert found is not None
        return found

    @asynccontextmanager
    async def open_object(self, access_key: str, request: ReadRequest) -> AsyncIterator[ObjectRead]:
        """The object as it is now; its bytes stay readable until the context ends."""
        work_for(access_key)
        async with (
            self._found_read(request) as (head, extents),
            self._reading(access_key, extents),
            aclosing(self._bodies.pieces(extents, head.range)) as pieces,
        ):
            self._watcher.note_read(request.bucket, (request.key,))
            with self._bodies.pump(extents, head.range) as pump:
                yield ObjectRead(head, pieces, pump)

    @asynccontextmanager
    async def _reading(self, access_key: str, extents: Sequence[Extent]) -> AsyncIterator[None]:
        with self._readers.reading(access_key, extents):
            yield

    @asynccontextmanager
    async def open_extents(self, request: ReadRequest) -> AsyncIterator[tuple[ReadHead, Sequence[Extent]]]:
        """Open an object as `open_object` does, for a caller that reads the bytes itself."""

        async with self._found_read(request) as found:
            self._watcher.note_read(request.bucket, (request.key,))
            yield found

    @asynccontextmanager
    async def _found_read(self, request: ReadRequest) -> AsyncIterator[tuple[ReadHead, Sequence[Extent]]]:
        """Few extents are read here, because a hand-over to a thread would cost more than they do."""

        async def find() -> tuple[ReadHead, list[Extent]]:
            head, extents = await self._find_read(request, extents_max=EXTENTS_HERE)
            if extents is None:
                await held.at_least(checksum_bytes(head.range.length))
                head, extents = await self._find_read(request, extents_max=None)
            return head, extents or []

        async with self._checksums.holding() as held, pinned(self._files, find) as found:
            yield found

    @asynccontextmanager
    async def open_stored(self, bucket: str, key: str) -> AsyncIterator[tuple[StoredObject | None, Sequence[Extent]]]:
        """The object of a key, with its extents, readable until the context ends. It does not count as a use. None
        where the key shows nothing.
        """

        async def find() -> tuple[StoredObject | None, list[Extent]]:
            stored, extents = self._index.here(lambda db: _find_stored(db, bucket, key, extents_max=EXTENTS_HERE))
            if stored is not None and extents is None:
                await held.at_least(checksum_bytes(stored.info.nbytes))
                stored, extents = await self._index.threaded(lambda db: _find_stored(db, bucket, key, extents_max=None))
            return stored, extents or []

        async with self._checksums.holding() as held, pinned(self._files, find) as found:
            yield found

    def stored(self, bucket: str, key: str) -> StoredObject | None:
        """The object of a key; None where there is none."""
        return self._index.here(lambda db: transaction.find_object(db, bucket, key))

    def locations(self, bucket: str, key: str) -> list[Extent]:
        """Where the bytes of what a key shows lie, without checksums; nobody keeps them there."""
        return self._index.here(lambda db: queries.locations(db, bucket, key))

    def is_damaged(self, bucket: str, key: str) -> bool:
        """Whether what the key shows is known to be damaged."""
        if not self.damaged.count:
            return False
        return self.damaged.has(bucket, key, self.locations(bucket, key))

    def note_damaged(self, bucket: str, key: str) -> None:
        """Remember that what the key shows is damaged, until the process ends or the key shows something else."""
        self.damaged.note(bucket, key, self.locations(bucket, key))

    async def object_parts(self, access_key: str, bucket: str, key: str) -> list[ObjectPart]:
        work_for(access_key)
        return await self._index.threaded(lambda db: queries.object_parts(db, bucket, key))

    async def list_objects(self, access_key: str, request: ListRequest) -> ListPage:
        work_for(access_key)
        self._index.here(lambda db: queries.bucket(db, request.bucket))

        async def fetch(start: str, inclusive: bool, limit: int) -> list[ObjectInfo]:
            return await self._index.threaded(
                lambda db: queries.page(
                    db, request.bucket, start=start, inclusive=inclusive, wanted=request.prefix, limit=limit
                )
            )

        return await list_page(request, fetch)


def _find_read(
    db: sqlite3.Connection, request: ReadRequest, *, extents_max: int | None, rules_of: RulesOf
) -> tuple[ReadHead, list[Extent] | None] | None:
    """None where `rules_of` gives no rules, as they are many. The extents are None where they are many (see
    `_extents`).
    """
    found = transaction.require_object(db, request.bucket, request.key)
    check_read(request.condition, found.info.etag, found.info.modified_at)
    if request.part_number is not None:
        if request.range is not None:
            raise CallerError(ErrorCode.INVALID_REQUEST, "Range and partNumber exclude each other", field="range")
        span = ByteRange(*queries.part_span(db, found, request.part_number))
    else:
        span = resolve_range(request.range, found.info.nbytes)
    rules = rules_of(db, request.bucket)
    if rules is None:
        return None
    head = ReadHead(found.info, span, expiry(rules, found.info))
    return head, _extents(db, found, span, extents_max=extents_max)


def _find_stored(
    db: sqlite3.Connection, bucket: str, key: str, *, extents_max: int | None
) -> tuple[StoredObject | None, list[Extent] | None]:
    """The object of a key, and its extents, from one state of the index: an object that was replaced has no extents.
    The extents are None where they are many (see `_extents`).
    """
    found = transaction.find_object(db, bucket, key)
    if found is None:
        return None, None
    return found, _extents(db, found, ByteRange(0, found.info.nbytes), extents_max=extents_max)


def _extents(
    db: sqlite3.Connection, found: StoredObject, span: ByteRange, *, extents_max: int | None
) -> list[Extent] | None:
    """None where the object has more parts than `extents_max`, or the span more checksums than are read here; None for
    `extents_max` is no bound.
    """
    if extents_max is not None:
        is_large = checksum_bytes(span.length) > CHECKSUMS_HERE_BYTES
        if is_large or (found.info.part_count or 1) > extents_max:
            return None
    return queries.extents_of(db, found.version, span.start, span.start + span.length)
