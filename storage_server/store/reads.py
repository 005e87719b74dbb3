"""Reading the store: objects, listings and prefixes. Needs only the index and the files, so any process may do it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import chain

from adapters.threads import HERE_ITEMS_MAX, computed, in_parts, others
from descriptors.conditions import check_read
from descriptors.errors import CallerError, ErrorCode
from descriptors.lifecycle import LifecycleRule, expiry
from descriptors.objects import (
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
from storage_server.store import queries, transaction
from storage_server.store.bodies import BodyReader
from storage_server.store.damaged import DamagedObjects
from storage_server.store.extents import Extent, ExtentFiles
from storage_server.store.listing import list_page
from storage_server.store.reader import IndexReader, pinned
from storage_server.store.reading import resolve_range, usable_prefix
from storage_server.store.resolved import ResolvedKeys


class Reads:
    """The reading calls of the StorageApi, and the chunks of a descriptor."""

    def __init__(
        self, index: IndexReader, files: ExtentFiles, bodies: BodyReader, resolved: ResolvedKeys | None
    ) -> None:
        self._index = index
        self._files = files
        self._bodies = bodies
        self._resolved = resolved
        self.damaged = DamagedObjects()

    async def head_bucket(self, bucket: str) -> BucketInfo:
        return self._index.here(lambda db: queries.bucket(db, bucket))

    async def list_buckets(self) -> list[BucketInfo]:
        return await self._index.threaded(queries.buckets)

    async def get_lifecycle(self, bucket: str) -> list[LifecycleRule]:
        return self._index.here(lambda db: queries.lifecycle(db, bucket))

    async def head_object(self, request: ReadRequest) -> ReadHead:
        head, _ = self._index.here(lambda db: _find_read(db, request, with_extents=False))
        return head

    @asynccontextmanager
    async def open_object(self, request: ReadRequest) -> AsyncIterator[ObjectRead]:
        """The object as it is now; its bytes stay readable until the context ends."""

        async def find() -> tuple[ReadHead, list[Extent]]:
            return self._index.here(lambda db: _find_read(db, request, with_extents=True))

        async with (
            pinned(self._files, find) as (head, extents),
            aclosing(self._bodies.pieces(extents, head.range)) as pieces,
        ):
            with self._bodies.pump(extents, head.range) as pump:
                yield ObjectRead(head, pieces, pump)

    @asynccontextmanager
    async def open_extents(self, request: ReadRequest) -> AsyncIterator[tuple[ReadHead, Sequence[Extent]]]:
        """As `open_object`, for those who read the bytes themselves."""

        async def find() -> tuple[ReadHead, list[Extent]]:
            return self._index.here(lambda db: _find_read(db, request, with_extents=True))

        async with pinned(self._files, find) as found:
            yield found

    async def object_parts(self, bucket: str, key: str) -> list[ObjectPart]:
        return await self._index.threaded(lambda db: queries.object_parts(db, bucket, key))

    async def list_objects(self, request: ListRequest) -> ListPage:
        self._index.here(lambda db: queries.bucket(db, request.bucket))

        async def fetch(start: str, inclusive: bool, limit: int) -> list[ObjectInfo]:
            return await self._index.threaded(
                lambda db: queries.page(db, request.bucket, start, inclusive, request.prefix, limit)
            )

        return await list_page(request, fetch)

    @asynccontextmanager
    async def open_prefix(
        self, bucket: str, keys: Sequence[str], chunk_bytes: int, *, prefix_only: bool
    ) -> AsyncIterator[list[list[Extent]]]:
        """Resolve and pin the chunks of a descriptor, in order, until the context ends: the extents of each.

        Errors as in `storage_server.store.reading.usable_prefix`.
        """

        async def find() -> tuple[list[list[Extent]], list[Extent]]:
            found: list[list[Extent] | None] = []
            for start, part in in_parts(keys):
                await others(start)
                found += await self._resolve(bucket, part)
            usable = await computed(
                lambda: usable_prefix(found, chunk_bytes, prefix_only=prefix_only), is_long=len(keys) > HERE_ITEMS_MAX
            )
            return usable, list(chain.from_iterable(usable))

        async with pinned(self._files, find) as (chunks, _):
            yield chunks

    async def _resolve(self, bucket: str, keys: Sequence[str]) -> list[list[Extent] | None]:
        """The extents of each key's object, None where there is none."""
        if self._resolved is None:
            return await self._index.threaded(lambda db: queries.prefix(db, bucket, keys))
        since, found = self._resolved.find(bucket, keys)
        unknown = [index for index, extents in enumerate(found) if extents is None]
        if unknown:
            wanted = [keys[index] for index in unknown]
            looked_up = await self._index.threaded(lambda db: queries.prefix(db, bucket, wanted))
            self._resolved.remember(since, bucket, zip(wanted, looked_up, strict=True))
            for index, extents in zip(unknown, looked_up, strict=True):
                found[index] = extents
        return found

    async def matched(self, bucket: str, keys: Sequence[str]) -> int:
        """How many of `keys`, from the first, are stored without a gap, and were not found damaged. What is found is
        remembered for the descriptor that follows.
        """
        for start, part in in_parts(keys):
            await others(start)
            for index, extents in enumerate(await self._resolve(bucket, part)):
                if extents is None or self.damaged.has(bucket, part[index], extents):
                    return start + index
        return len(keys)


def _find_read(db: sqlite3.Connection, request: ReadRequest, *, with_extents: bool) -> tuple[ReadHead, list[Extent]]:
    found = transaction.require_object(db, request.bucket, request.key)
    check_read(request.condition, found.info.etag, found.info.modified_at)
    if request.part_number is not None:
        if request.range is not None:
            raise CallerError(ErrorCode.INVALID_REQUEST, "Range and partNumber exclude each other", field="range")
        span = ByteRange(*queries.part_span(db, found, request.part_number))
    else:
        span = resolve_range(request.range, found.info.nbytes)
    head = ReadHead(found.info, span, expiry(queries.lifecycle(db, request.bucket), found.info))
    if not with_extents:
        return head, []
    extents = queries.extents_of(db, found.version, span.start, span.start + span.length)
    return head, extents
