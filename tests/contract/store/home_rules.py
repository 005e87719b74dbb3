"""The rules of storage_server.home.service.HomeObjects that go beyond those of ObjectsApi, for every home.

To try a home, subclass `HomeRules` in a test module and override its `home`.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from descriptors.errors import CallerError, ErrorCode, ObjectCacheError
from descriptors.objects import PutRequest, RangeSpec, ReadRequest
from storage_server.home.fetch.bulk_reads import Into
from storage_server.home.rules.proof import make_proof, proved_bytes
from storage_server.home.service import HomeObjects, Sent
from storage_server.planning.block_checksums import BLOCK_BYTES, BlockChecksums
from tests.support.chunks import BytesBody
from tests.support.store_bed import content

OWNER_KEY = "OWNERKEY"
BUCKET = "homes"
KEY = "a" * 64
NBYTES = 5 * BLOCK_BYTES + 321
DATA = content(NBYTES)


def packed(data: bytes) -> bytes:
    """The packed checksums of the blocks."""
    blocks = BlockChecksums()
    blocks.update(memoryview(data))
    return blocks.packed()


async def sent(home: HomeObjects, data: bytes = DATA, key: str = KEY) -> Sent:
    return await home.send(PutRequest(BUCKET, key, len(data)), BytesBody(data), make_proof(len(data), packed(data)))


def into(nbytes: int) -> tuple[bytearray, list[int], Into]:
    """Memory, the steps that are reported of it, and what a read is given."""
    memory, steps = bytearray(nbytes), list[int]()
    return memory, steps, Into(memoryview(memory), BLOCK_BYTES, 2 * BLOCK_BYTES, steps.append)


class HomeRules:
    """Subclasses override `home`."""

    @pytest.fixture
    async def home(self) -> HomeObjects:
        """The home under test, with an empty bucket BUCKET."""
        raise NotImplementedError

    async def test_a_bucket_is_there_or_the_caller_is_wrong(self, home: HomeObjects) -> None:
        await home.require_bucket(BUCKET)
        with pytest.raises(CallerError) as failed:
            await home.require_bucket("unknown")
        assert failed.value.code is ErrorCode.NO_SUCH_BUCKET

    async def test_an_object_is_seen_from_its_storing_to_its_deletion(self, home: HomeObjects) -> None:
        assert not await home.has_object(BUCKET, KEY, time.monotonic())
        await sent(home)
        assert await home.has_object(BUCKET, KEY, time.monotonic())
        await home.delete_object(OWNER_KEY, BUCKET, KEY)
        assert not await home.has_object(BUCKET, KEY, time.monotonic())

    async def test_what_is_sent_is_shown_with_the_etag_and_time_that_are_answered(self, home: HomeObjects) -> None:
        answer = await sent(home)
        info = (await home.head_object(OWNER_KEY, ReadRequest(BUCKET, KEY))).info
        assert info.nbytes == NBYTES
        assert answer.etag in ("", info.etag)
        assert abs(answer.modified_at - info.modified_at) <= 2.0

    @pytest.mark.parametrize("span", [None, RangeSpec(0, BLOCK_BYTES - 1), RangeSpec(BLOCK_BYTES, None)])
    async def test_a_range_comes_with_the_proof_of_the_whole_object(
        self, home: HomeObjects, span: RangeSpec | None
    ) -> None:
        await sent(home)
        async with home.open_range(ReadRequest(BUCKET, KEY, span)) as (head, proof, body):
            found = b"".join([bytes(piece) async for piece in body])
        assert found == DATA[head.range.start : head.range.start + head.range.length]
        assert head.info.nbytes == NBYTES
        assert proof is not None
        assert proved_bytes(proof, packed(DATA), NBYTES) == NBYTES

    async def test_a_proof_is_of_these_bytes_and_no_others(self, home: HomeObjects) -> None:
        await sent(home)
        async with home.open_range(ReadRequest(BUCKET, KEY)) as (_, proof, body):
            assert len(b"".join([bytes(piece) async for piece in body])) == NBYTES
        assert proof is not None
        assert proved_bytes(proof, packed(bytes(NBYTES)), NBYTES) is None

    @pytest.mark.parametrize("start", [0, 2 * BLOCK_BYTES])
    async def test_bytes_come_into_memory_in_the_steps_that_were_asked_for(self, home: HomeObjects, start: int) -> None:
        await sent(home)
        memory, steps, target = into(NBYTES - start)
        async with home.open_into(ReadRequest(BUCKET, KEY, RangeSpec(start, None)), target) as (head, proof, body):
            await body
        assert (head.range.start, head.range.length) == (start, NBYTES - start)
        assert proof is not None
        assert bytes(memory) == DATA[start:]
        assert steps == [*range(BLOCK_BYTES, NBYTES - start, 2 * BLOCK_BYTES), NBYTES - start]

    async def test_an_object_that_does_not_fit_the_memory_is_not_taken_for_one_that_does(
        self, home: HomeObjects
    ) -> None:
        await sent(home)
        _, _, target = into(NBYTES + 1)
        with pytest.raises(ObjectCacheError):
            async with home.open_into(ReadRequest(BUCKET, KEY), target) as (_, _, body):
                await body

    async def test_a_read_that_is_left_early_writes_into_its_memory_no_more(self, home: HomeObjects) -> None:
        await sent(home)
        memory, _, target = into(NBYTES)
        async with home.open_into(ReadRequest(BUCKET, KEY), target):
            pass
        memory[:] = bytes(NBYTES)
        other, _, whole = into(NBYTES)
        async with home.open_into(ReadRequest(BUCKET, KEY), whole) as (_, _, body):
            await body  # nobody tells of a write that does not come: a read behind it, the same way, has ended
        assert bytes(other) == DATA
        assert not any(memory)

    async def test_a_missing_object_is_the_callers_error_however_it_is_read(self, home: HomeObjects) -> None:
        request = ReadRequest(BUCKET, KEY)
        opened: list[Any] = [home.open_range(request), home.open_into(request, into(NBYTES)[2])]
        for opening in opened:
            with pytest.raises(CallerError) as failed:
                async with opening:
                    pass
            assert failed.value.code is ErrorCode.NO_SUCH_KEY
