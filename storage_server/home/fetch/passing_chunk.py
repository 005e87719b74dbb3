"""A chunk of the home that finds no room in the cache, read range by range."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from descriptors.conditions import ReadCondition
from descriptors.errors import ErrorCode, ServerError
from descriptors.objects import ObjectInfo, RangeSpec, ReadRequest
from objectcache.adapters.native import block_words
from storage_server.delivery.gather.passing import PassingExtent
from storage_server.home.fetch.bulk_reads import Into
from storage_server.home.fetch.receiving import wrong
from storage_server.home.rules.attempts import ATTEMPTS_MAX, pause_before_next_s
from storage_server.home.rules.proof import Proof, proves
from storage_server.home.s3.turns import Turns
from storage_server.home.service import HomeObjects
from storage_server.kernel.data.io_threads import IoThreads
from storage_server.planning.block_checksums import BLOCK_BYTES

UNITS_MIN = 64
"""A proof with fewer units than that, of more than a block each, would have a chunk read in too large pieces."""
LATER_GROUP = 1
"""Behind the first layers of chunks that come into the cache."""
_numbers = count()


class PassingChunk:
    """Reads one version of a chunk, each range for itself. With a proof each range is proved; without one it is as the
    home sends it.
    """

    def __init__(
        self,
        objects: HomeObjects,
        turns: Turns,
        io: IoThreads,
        bucket: str,
        info: ObjectInfo,
        proof: Proof | None,
        on_passed: Callable[[int], None],
    ) -> None:
        """`on_passed` is called with the bytes of each range."""
        self._objects = objects
        self._turns = turns
        self._io = io
        self._bucket = bucket
        self._info = info
        is_fine = proof is not None and proof.unit_bytes <= max(BLOCK_BYTES, info.nbytes // UNITS_MIN)
        self._proof = proof if is_fine else None
        self._on_passed = on_passed

    @property
    def extent(self) -> PassingExtent:
        """All of it."""
        unit_bytes = BLOCK_BYTES if self._proof is None else self._proof.unit_bytes
        return PassingExtent.of(f"passing-{next(_numbers)}", self._info.nbytes, unit_bytes, self._read)

    async def _read(self, index: int, start: int, view: memoryview) -> None:
        """Bring the bytes from `start` on. Raises ServerError; CallerError where the object has changed or gone."""
        for attempt in count(1):
            try:
                async with self._turns.turn(LATER_GROUP, index, self._bucket):
                    await self._ask(start, view)
            except ServerError as error:
                if error.code is not ErrorCode.SLOW_DOWN or attempt == ATTEMPTS_MAX:
                    raise
            else:
                break
            await asyncio.sleep(pause_before_next_s(attempt))
        if self._proof is not None:
            words = await self._io.run(lambda: block_words(view))
            if not proves(self._proof, words, start, start + len(view)):
                raise wrong("the bytes are not those that were put")
        self._on_passed(len(view))

    async def _ask(self, start: int, view: memoryview) -> None:
        condition = ReadCondition(if_match=(self._info.etag,))
        span = RangeSpec(start, start + len(view) - 1)
        into = Into(view, len(view), len(view), lambda _: None)
        request = ReadRequest(self._bucket, self._info.key, span, condition=condition)
        async with self._objects.open_into(request, into) as (head, _, received):
            if head.info.etag != self._info.etag:
                raise wrong("the object has changed meanwhile")
            if (head.range.start, head.range.length) != (start, len(view)):
                raise wrong("another range came than was asked for")
            await received
