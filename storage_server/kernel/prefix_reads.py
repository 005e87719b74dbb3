"""Reading the chunks of a prefix: how many are there, where they lie, and their checksums, whose memory is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from itertools import chain

from descriptors.descriptor import CHUNK_COUNT_MAX, invalid
from descriptors.errors import ErrorCode, ServerError
from descriptors.presence import Presence
from descriptors.units import KIB, MIB
from objectcache.adapters.caller import CallerTurns
from objectcache.adapters.threads import HERE_ITEMS_MAX, computed
from storage_server.kernel.data.extents import ExtentFiles
from storage_server.kernel.index import queries
from storage_server.kernel.index.reader import IndexReader, pinned
from storage_server.kernel.index.resolved import ResolvedKeys
from storage_server.kernel.rules.damaged import DamagedObjects
from storage_server.kernel.rules.reading import is_taken, usable_prefix
from storage_server.kernel.shared_room import Held, SharedRoom
from storage_server.kernel.watcher import Watcher
from storage_server.planning.block_checksums import BLOCK_BYTES, WORD_BYTES, checksum_bytes
from storage_server.planning.extent import Extent
from storage_server.planning.forms import Takes

EXTENTS_AT_ONCE = 4_096
"""A query of so many takes some ten milliseconds."""
PARTS_AT_ONCE = 2
PREFIX_EXTENTS_MAX = 2 * CHUNK_COUNT_MAX
"""The chunks of one request lie in so many extents at most; they take some 50 MB."""
CHECKSUMS_HERE_BYTES = 64 * KIB
"""The checksums of 256 MiB. So many are read here, and are not counted: a connection takes as much."""
CHECKSUMS_AT_ONCE_BYTES = 4 * MIB


class PrefixReads:
    """The chunks of lookups and descriptors. `checksums` has room for the checksums of all that is being read."""

    def __init__(
        self,
        index: IndexReader,
        files: ExtentFiles,
        resolved: ResolvedKeys | None,
        watcher: Watcher,
        checksums: SharedRoom,
        damaged: DamagedObjects,
    ) -> None:
        self._index = index
        self._files = files
        self._resolved = resolved
        self._watcher = watcher
        self._checksums = checksums
        self._damaged = damaged
        self._turns = CallerTurns(PARTS_AT_ONCE)

    @asynccontextmanager
    async def open(
        self, bucket: str, keys: Sequence[str], chunk_bytes: int, *, prefix_only: bool, reader: Takes | None = None
    ) -> AsyncIterator[list[list[Extent]]]:
        """Resolve and pin the chunks of a descriptor, in order, until the context ends: the extents of each chunk.

        Raises what `storage_server.kernel.rules.reading.usable_prefix` raises, and CallerError(InvalidRequest) where
        they are so many bytes that their checksums exceed a caller's share of the memory.
        """

        async def find() -> tuple[list[list[Extent]], list[Extent]]:
            await self.expect(held, len(keys), chunk_bytes)
            found, extent_count = await self.found(bucket, keys, held)
            usable = await computed(
                lambda: usable_prefix(found, chunk_bytes, prefix_only=prefix_only, reader=reader),
                is_long=len(keys) + extent_count > HERE_ITEMS_MAX,
            )
            await self.reserve(held, len(usable), chunk_bytes)
            await self.fill_checksums(bucket, keys, usable, chunk_bytes)
            return usable, list(chain.from_iterable(usable))

        async with self.reserving() as held, pinned(self._files, find) as (chunks, _):
            self._watcher.note_read(bucket, keys[: len(chunks)])
            yield chunks

    def reserving(self) -> AbstractAsyncContextManager[Held]:
        """The part that one request has of the memory for checksums, until the context ends."""
        return self._checksums.holding()

    async def expect(self, held: Held, chunk_count: int, chunk_bytes: int) -> None:
        """Wait for the memory that a delivery of all these will need: at once, because requests that have some and wait
        for more keep each other waiting. Raises ServerError(SlowDown).
        """
        checksums_bytes = chunk_count * checksum_bytes(chunk_bytes)
        if checksums_bytes > CHECKSUMS_HERE_BYTES:
            await held.at_least(2 * checksums_bytes)

    async def reserve(self, held: Held, chunk_count: int, chunk_bytes: int) -> None:
        """Wait for the memory of so many chunks' checksums. Raises CallerError(InvalidRequest) where no caller may
        have so much, ServerError(SlowDown) where it does not become free.
        """
        await self._hold(held, chunk_count * checksum_bytes(chunk_bytes))

    async def _hold(self, held: Held, checksums_bytes: int) -> None:
        """A delivery has its checksums twice: as the index has them, and joined."""
        if 2 * checksums_bytes > self._checksums.share:
            nbytes, most = (each // WORD_BYTES * BLOCK_BYTES for each in (checksums_bytes, self._checksums.share // 2))
            raise invalid("chunk_keys", f"these chunks have {nbytes} bytes; one delivery has at most {most}")
        if checksums_bytes > CHECKSUMS_HERE_BYTES:
            await held.at_least(2 * checksums_bytes)

    async def fill_checksums(
        self, bucket: str, keys: Sequence[str], usable: list[list[Extent]], chunk_bytes: int
    ) -> None:
        """Bring the checksums of the chunks that came without them, in parts of bounded bytes.

        Raises ServerError(SlowDown) where a chunk has changed meanwhile.
        """
        if chunk_bytes <= queries.CHECKED_EXTENT_BYTES_MAX:
            return
        lacking = await computed(
            lambda: [at for at, chunk in enumerate(usable) if not all(extent.has_checksums for extent in chunk)],
            is_long=len(usable) > HERE_ITEMS_MAX,
        )
        while lacking:
            part, nbytes = [], 0
            while lacking and nbytes < CHECKSUMS_AT_ONCE_BYTES:
                part.append(lacking.pop())
                nbytes += sum(checksum_bytes(extent.nbytes) for extent in usable[part[-1]])
            wanted = [keys[at] for at in part]
            full = await self._index.threaded(lambda db: queries.checked(db, bucket, wanted))  # noqa: B023
            for at, extents in zip(part, full, strict=True):
                if extents != usable[at]:
                    raise ServerError(ErrorCode.SLOW_DOWN, f"chunk_keys[{at}] changes while it is read", retryable=True)
                usable[at] = extents

    async def resolve(self, bucket: str, keys: Sequence[str]) -> AsyncGenerator[list[list[Extent] | None], None]:
        """The extents of each key's object, in parts; None where there is no chunk, or where its bytes are damaged."""
        start = 0
        async with aclosing(self._in_parts(bucket, keys)) as parts:
            async for part in parts:
                yield self._without_damaged(bucket, keys[start : start + len(part)], part)
                start += len(part)

    def _without_damaged(
        self, bucket: str, keys: Sequence[str], part: list[list[Extent] | None]
    ) -> list[list[Extent] | None]:
        if not self._damaged.count:
            return part
        return [
            None if extents is None or self._damaged.has(bucket, key, extents) else extents
            for key, extents in zip(keys, part, strict=True)
        ]

    async def found(
        self, bucket: str, keys: Sequence[str], held: Held, *, takes_damaged: bool = True
    ) -> tuple[list[list[Extent] | None], int]:
        """The extents of each key's object, None where there is no chunk; and how many they are together. `held` has
        room for their checksums then.

        Raises CallerError(InvalidRequest) where they lie in more than PREFIX_EXTENTS_MAX, or as `reserve` does.
        """
        found: list[list[Extent] | None] = []
        count = nbytes = 0
        async with aclosing(self._in_parts(bucket, keys) if takes_damaged else self.resolve(bucket, keys)) as parts:
            async for part in parts:
                found += part
                for extents in part:
                    if extents is not None:
                        count += len(extents)
                        nbytes += sum([len(extent.checksums) for extent in extents])
                if count > PREFIX_EXTENTS_MAX:
                    problem = f"these chunks have more than {PREFIX_EXTENTS_MAX} parts together: store each in one PUT"
                    raise invalid("chunk_keys", problem)
                await self._hold(held, nbytes)
        return found, count

    async def _in_parts(self, bucket: str, keys: Sequence[str]) -> AsyncGenerator[list[list[Extent] | None], None]:
        """The extents of each key's object, None where there is no chunk, in parts whose work is bounded in keys and
        in extents. Between two of them other tasks have their turn. Few parts are in work at once, and callers take
        turns: the event loop would stand still for as many parts as a caller has connections.
        """
        start = 0
        while start < len(keys):
            if start:
                await asyncio.sleep(0)
            async with self._turns.turn():
                part = await self._resolve(bucket, keys[start : start + HERE_ITEMS_MAX])
            yield part
            start += len(part)

    async def _resolve(self, bucket: str, keys: Sequence[str]) -> list[list[Extent] | None]:
        """The extents of the first keys' objects, of one at least; None where there is no chunk."""
        if self._resolved is None:
            return await self._index.threaded(lambda db: queries.prefix(db, bucket, keys, EXTENTS_AT_ONCE))
        since, found = self._resolved.find(bucket, keys)
        unknown = [index for index, extents in enumerate(found) if extents is None]
        if unknown:
            wanted = [keys[index] for index in unknown]
            looked_up = await self._index.threaded(lambda db: queries.prefix(db, bucket, wanted, EXTENTS_AT_ONCE))
            self._resolved.remember(since, bucket, zip(wanted, looked_up, strict=False))
            for index, extents in zip(unknown, looked_up, strict=False):
                found[index] = extents
            if len(looked_up) < len(wanted):
                del found[unknown[len(looked_up)] :]
        return found

    async def matched(self, bucket: str, keys: Sequence[str], lease_s: float = 0.0, reader: Takes | None = None) -> int:
        """How many of `keys`, from the first, are stored without a gap and are not known to be damaged. Encoded chunks
        count if the reader takes them. The extents are remembered for the descriptor that follows.
        """
        since = self._watcher.before_lookup()
        return self._watcher.note_lookup(bucket, keys, await self._matched(bucket, keys, reader), since, lease_s)

    async def present(
        self, bucket: str, keys: Sequence[str], lease_s: float = 0.0, reader: Takes | None = None
    ) -> Presence:
        """Which of `keys` `matched` would count, each by itself."""
        since = self._watcher.before_lookup()
        found: list[bool] = []
        async with aclosing(self._in_parts(bucket, keys)) as parts:
            async for part in parts:
                found += [
                    self._is_there(bucket, key, extents, reader)
                    for key, extents in zip(keys[len(found) :], part, strict=False)
                ]
        there = [at for at, is_there in enumerate(found) if is_there]
        for at in self._watcher.note_present(bucket, [keys[at] for at in there], since, lease_s):
            found[there[at]] = False
        return tuple(found)

    def _is_there(self, bucket: str, key: str, extents: list[Extent] | None, reader: Takes | None) -> bool:
        return extents is not None and is_taken(extents, reader) and not self._damaged.has(bucket, key, extents)

    async def _matched(self, bucket: str, keys: Sequence[str], reader: Takes | None) -> int:
        count = 0
        async with aclosing(self._in_parts(bucket, keys)) as parts:
            async for part in parts:
                for extents in part:
                    if not self._is_there(bucket, keys[count], extents, reader):
                        return count
                    count += 1
        return count
