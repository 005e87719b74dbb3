"""The rules of storage_server.planning.source.ChunkSource, for every implementation.

To try an implementation, subclass `ChunkSourceRules` in a test module and override its `bed`.

A rule that needs the store to rewrite files (`rearrange`) is kept trivially by a source whose bytes never move. One
rule is another for a source that can get a damaged chunk again: see `CachedSourceRules`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np
import pytest

from descriptors.errors import CallerError, ChunkUnavailable, ErrorCode
from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from storage_server.delivery.gather.coming import Coming, with_landed
from storage_server.planning.block_checksums import BLOCK_BYTES
from storage_server.planning.extent import CorruptExtentError, Extent
from storage_server.planning.plan import Payload, plan_delivery
from storage_server.planning.rows import SourceTable, make_table
from storage_server.planning.source import ChunkSource, RowFailure
from tests.support.chunks import layer_of, make_chunks
from tests.support.sources import resolved
from tests.support.waiting import settled, until

BUCKET = "chunks"
LAYOUT = ChunkLayout(num_layers=4, chunk_tokens=16, per_layer_chunk_bytes=20_000)
"""A chunk of 80,000 bytes: several blocks, and no layer ends where a block does."""
CHUNK_COUNT = 5
KEYS, CHUNKS = make_chunks(CHUNK_COUNT, LAYOUT)
PAYLOAD_BYTES = 50_000


class SourceBed(Protocol):
    """A source under test, and the ways to change what it holds. The bucket `BUCKET` exists and is empty."""

    source: ChunkSource

    async def put(self, key: str, data: bytes) -> None:
        """Store a chunk, in place of one that was there."""

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete chunks."""

    async def rearrange(self) -> None:
        """Move stored bytes to other places, as compaction does, and let go of the old places."""

    async def damage(self, key: str, offset: int) -> None:
        """Change the byte at `offset` of the chunk where it is stored."""


@dataclass
class Reading:
    """What reading every payload of a prefix brought: the bytes, and the first failure with its payload."""

    table: SourceTable
    target: np.ndarray
    payload: Payload | None = None
    failure: RowFailure | None = None
    kept: list[np.ndarray] = field(default_factory=list)

    @property
    def failed_target(self) -> int:
        """Which byte of its payload failed."""
        assert self.failure is not None
        assert self.payload is not None
        return self.table.target_of(self.table.rows(self.payload), self.failure.row_index, self.failure.failed_at)


def table_of(chunks: Sequence[Sequence[Extent]], addresses: Sequence[int | None] | None = None) -> SourceTable:
    """The table of a delivery of these chunks, as the pipeline makes it. `addresses` are those of resident extents."""
    extents = list(chain.from_iterable(chunks))
    return make_table(chunks, with_landed(extents, addresses or [None] * len(extents)))


async def read_payloads(
    source: ChunkSource,
    chunks: Sequence[Sequence[Extent]],
    mode: Mode = Mode.CHUNK_MAJOR,
    resident: Sequence[np.ndarray] = (),
) -> Reading:
    """Read every payload of the chunks. The first chunks are taken from memory, as many as `resident` has."""
    addresses: list[int | None] = []
    for index, chunk in enumerate(chunks):
        for extent in chunk:
            is_resident = index < len(resident)
            addresses.append(int(resident[index].ctypes.data) + extent.object_offset if is_resident else None)
    table = table_of(chunks, addresses)
    with Coming.among(table, chunks) or nullcontext() as coming:
        table = table if coming is None else coming.table
        target = np.zeros(LAYOUT.delivery_bytes(len(chunks)), dtype=np.uint8)
        reading = Reading(table, target, kept=list(resident))
        for payload in plan_delivery(mode, LAYOUT, len(chunks), PAYLOAD_BYTES).payloads():
            if coming is not None:
                await coming.wait_for(payload)
            address = int(target.ctypes.data) + payload.target_offset
            rows = table.rows(payload)
            failure = await asyncio.to_thread(source.read_rows, table, rows, address, past_cache=False)
            if failure is not None:
                reading.payload, reading.failure = payload, failure
                return reading
    return reading


def layer_major(chunks: np.ndarray) -> bytes:
    return b"".join(layer_of(chunks, LAYOUT, index).tobytes() for index in range(LAYOUT.num_layers))


class ChunkSourceRules:
    """Subclasses override `bed`."""

    @pytest.fixture
    async def bed(self) -> SourceBed:
        """The source under test."""
        raise NotImplementedError

    @pytest.fixture
    async def stored(self, bed: SourceBed) -> SourceBed:
        """The bed with CHUNKS stored under KEYS."""
        await asyncio.gather(*(bed.put(key, chunk.tobytes()) for key, chunk in zip(KEYS, CHUNKS, strict=True)))
        return bed

    # opening

    async def test_opened_chunks_are_those_asked_for_in_that_order(self, stored: SourceBed) -> None:
        order = [3, 0, 4, 1]
        keys = [KEYS[index] for index in order]
        async with stored.source.open_chunks(BUCKET, keys, LAYOUT, prefix_only=False) as chunks:
            assert len(chunks) == len(order)
            reading = await read_payloads(stored.source, chunks)
        assert reading.failure is None
        assert reading.target.tobytes() == CHUNKS[order].tobytes()

    async def test_chunks_that_are_here_are_resolved_without_bringing_others(self, stored: SourceBed) -> None:
        await stored.delete([KEYS[3]])
        async with stored.source.open_chunks(BUCKET, KEYS[:3], LAYOUT, prefix_only=False) as chunks:
            await read_payloads(stored.source, chunks)
        async with asyncio.timeout(30):
            while None in await resolved(stored.source, BUCKET, KEYS[:3]):
                await settled()  # what came from elsewhere is being kept
        assert (await resolved(stored.source, BUCKET, [KEYS[3], "0" * 64])) == [None, None]
        found = await resolved(stored.source, BUCKET, KEYS[:3])
        assert [sum(extent.nbytes for extent in extents or ()) for extents in found] == [LAYOUT.chunk_bytes] * 3

    async def test_the_extents_of_a_chunk_cover_it_without_gap_or_overlap(self, stored: SourceBed) -> None:
        async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=False) as chunks:
            for extents in chunks:
                at = 0
                for extent in extents:
                    assert extent.object_offset == at
                    assert extent.nbytes > 0
                    at += extent.nbytes
                assert at == LAYOUT.chunk_bytes

    @pytest.mark.parametrize("missing", [0, 2, CHUNK_COUNT - 1])
    async def test_a_missing_chunk_is_named_by_its_index(self, stored: SourceBed, missing: int) -> None:
        await stored.delete([KEYS[missing]])
        with pytest.raises(ChunkUnavailable) as failed:
            async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=False):
                pass
        assert (failed.value.code, failed.value.index) == (ErrorCode.NO_SUCH_CHUNK, missing)
        assert failed.value.field == f"chunk_keys[{missing}]"

    async def test_of_several_missing_chunks_the_first_is_named(self, stored: SourceBed) -> None:
        await stored.delete([KEYS[3], KEYS[1]])
        with pytest.raises(ChunkUnavailable) as failed:
            async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=False):
                pass
        assert failed.value.index == 1

    @pytest.mark.parametrize("nbytes", [0, LAYOUT.chunk_bytes - 1, LAYOUT.chunk_bytes + 1])
    async def test_a_chunk_of_another_size_is_refused_with_its_index(self, stored: SourceBed, nbytes: int) -> None:
        await stored.put(KEYS[2], bytes(nbytes))
        with pytest.raises(ChunkUnavailable) as failed:
            async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=False):
                pass
        assert (failed.value.code, failed.value.index) == (ErrorCode.CHUNK_SIZE_MISMATCH, 2)

    async def test_with_prefix_only_the_chunks_before_the_first_gap_are_opened(self, stored: SourceBed) -> None:
        await stored.delete([KEYS[3]])
        async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=True) as chunks:
            assert len(chunks) == 3
            reading = await read_payloads(stored.source, chunks)
        assert reading.target.tobytes() == CHUNKS[:3].tobytes()

    async def test_with_prefix_only_a_chunk_of_another_size_ends_the_prefix(self, stored: SourceBed) -> None:
        await stored.put(KEYS[1], b"short")
        async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=True) as chunks:
            assert len(chunks) == 1

    @pytest.mark.parametrize("prefix_only", [False, True])
    async def test_without_the_first_chunk_there_is_no_prefix(self, stored: SourceBed, prefix_only: bool) -> None:
        await stored.delete([KEYS[0]])
        with pytest.raises(ChunkUnavailable) as failed:
            async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=prefix_only):
                pass
        assert (failed.value.code, failed.value.index) == (ErrorCode.NO_SUCH_CHUNK, 0)

    async def test_an_unknown_bucket_is_the_callers_error(self, stored: SourceBed) -> None:
        with pytest.raises(CallerError) as failed:
            async with stored.source.open_chunks("unknown", KEYS, LAYOUT, prefix_only=True):
                pass
        assert failed.value.code is ErrorCode.NO_SUCH_BUCKET
        with pytest.raises(CallerError) as failed:
            await stored.source.matched("unknown", KEYS)
        assert failed.value.code is ErrorCode.NO_SUCH_BUCKET

    # matching

    async def test_matched_counts_the_chunks_before_the_first_gap(self, stored: SourceBed) -> None:
        assert await stored.source.matched(BUCKET, KEYS) == CHUNK_COUNT
        await stored.delete([KEYS[2]])
        assert await stored.source.matched(BUCKET, KEYS) == 2
        assert await stored.source.matched(BUCKET, KEYS[3:]) == CHUNK_COUNT - 3
        await stored.delete([KEYS[0]])
        assert await stored.source.matched(BUCKET, KEYS) == 0

    async def test_matched_sees_a_chunk_as_soon_as_it_is_stored(self, bed: SourceBed) -> None:
        for index in range(CHUNK_COUNT):
            assert await bed.source.matched(BUCKET, KEYS) == index
            await bed.put(KEYS[index], CHUNKS[index].tobytes())
        assert await bed.source.matched(BUCKET, KEYS) == CHUNK_COUNT

    async def test_each_chunk_is_found_by_itself(self, stored: SourceBed) -> None:
        keys = [*KEYS, "0" * 64]
        every = (*(True for _ in KEYS), False)
        assert await stored.source.present(BUCKET, keys) == (every, True)
        await stored.delete([KEYS[0], KEYS[2]])
        for asked in (keys, keys[::-1]):
            expected = tuple(key in KEYS and key not in (KEYS[0], KEYS[2]) for key in asked)
            assert await stored.source.present(BUCKET, asked, 60.0) == (expected, True)
        with pytest.raises(CallerError) as failed:
            await stored.source.present("unknown", KEYS)
        assert failed.value.code is ErrorCode.NO_SUCH_BUCKET

    async def test_a_damaged_chunk_is_not_matched_until_it_is_written_again(self, stored: SourceBed) -> None:
        async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=False) as chunks:
            stored.source.note_damage(BUCKET, KEYS[2], chunks[2])
        assert await stored.source.matched(BUCKET, KEYS) == 2
        assert await stored.source.matched(BUCKET, KEYS[3:]) == CHUNK_COUNT - 3
        assert await stored.source.present(BUCKET, KEYS) == (tuple(at != 2 for at in range(CHUNK_COUNT)), True)
        await stored.put(KEYS[2], CHUNKS[2].tobytes())
        assert await stored.source.matched(BUCKET, KEYS) == CHUNK_COUNT

    # pins

    async def test_opened_bytes_stay_readable_when_the_chunks_are_overwritten_or_deleted(
        self, stored: SourceBed
    ) -> None:
        async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=False) as chunks:
            await stored.put(KEYS[0], bytes(LAYOUT.chunk_bytes))
            await stored.delete(KEYS[1:])
            await stored.rearrange()
            reading = await read_payloads(stored.source, chunks)
        assert reading.failure is None
        assert reading.target.tobytes() == CHUNKS.tobytes()

    async def test_opened_bytes_stay_readable_when_they_are_moved(self, stored: SourceBed) -> None:
        await stored.delete(KEYS[1:4])
        kept = [KEYS[0], KEYS[4]]
        async with stored.source.open_chunks(BUCKET, kept, LAYOUT, prefix_only=False) as chunks:
            await stored.rearrange()
            reading = await read_payloads(stored.source, chunks)
        assert reading.target.tobytes() == CHUNKS[[0, 4]].tobytes()
        async with stored.source.open_chunks(BUCKET, kept, LAYOUT, prefix_only=False) as moved:
            reading = await read_payloads(stored.source, moved)
        assert reading.target.tobytes() == CHUNKS[[0, 4]].tobytes()

    async def test_kept_extents_stay_readable_until_they_are_released(self, stored: SourceBed) -> None:
        async with stored.source.open_chunks(BUCKET, KEYS[:1], LAYOUT, prefix_only=False) as chunks:
            extents, since = chunks[0], stored.source.generation
            pins = stored.source.keep(extents, since)
        assert pins is not None
        await stored.delete(KEYS)
        await stored.rearrange()
        reading = await read_payloads(stored.source, [extents])
        pins.release()
        assert reading.target.tobytes() == CHUNKS[0].tobytes()

    async def test_extents_that_may_have_gone_since_cannot_be_kept(self, stored: SourceBed) -> None:
        """A neighbour stays, so that the file stays too, and only the deleted bytes go."""
        async with stored.source.open_chunks(BUCKET, KEYS[:1], LAYOUT, prefix_only=False) as chunks:
            extents, since = chunks[0], stored.source.generation
        await stored.delete([KEYS[0]])

        def have_gone() -> bool:
            pins = stored.source.keep(extents, since)
            if pins is not None:
                pins.release()
            return pins is None

        await until(have_gone)
        assert stored.source.generation >= since

    async def test_a_failed_open_keeps_nothing(self, stored: SourceBed) -> None:
        """The bed's end checks that nothing is pinned."""
        await stored.delete([KEYS[4]])
        with pytest.raises(ChunkUnavailable):
            async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=False):
                pass
        with pytest.raises(RuntimeError, match="the reader fails"):
            async with stored.source.open_chunks(BUCKET, KEYS[:4], LAYOUT, prefix_only=False):
                raise RuntimeError("the reader fails")

    # reading

    @pytest.mark.parametrize("past_cache", [False, True])
    @pytest.mark.parametrize("mode", list(Mode))
    async def test_rows_bring_the_bytes_of_their_slices_and_touch_nothing_else(
        self, stored: SourceBed, mode: Mode, past_cache: bool
    ) -> None:
        expected = CHUNKS.tobytes() if mode is Mode.CHUNK_MAJOR else layer_major(CHUNKS)
        guarded = np.full(PAYLOAD_BYTES + 200, 0xAA, dtype=np.uint8)
        async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=False) as chunks:
            table = table_of(chunks)
            coming = Coming.among(table, chunks)
            if coming is not None:
                with coming:  # every chunk has come: its checksums are filled in
                    table = coming.table
            for payload in plan_delivery(mode, LAYOUT, len(chunks), PAYLOAD_BYTES).payloads():
                guarded[:] = 0xAA
                address = int(guarded.ctypes.data) + 100
                failure = await asyncio.to_thread(
                    stored.source.read_rows, table, table.rows(payload), address, past_cache=past_cache
                )
                assert failure is None
                wanted = expected[payload.target_offset : payload.target_offset + payload.nbytes]
                assert guarded[100 : 100 + payload.nbytes].tobytes() == wanted
                assert (guarded[:100] == 0xAA).all()
                assert (guarded[100 + payload.nbytes :] == 0xAA).all()

    @pytest.mark.parametrize("resident_count", [2, CHUNK_COUNT])
    async def test_resident_rows_are_copied_from_memory(self, stored: SourceBed, resident_count: int) -> None:
        """The memory holds other bytes than the store, so that it shows where the bytes came from."""
        resident = [np.full(LAYOUT.chunk_bytes, 7 + index, dtype=np.uint8) for index in range(resident_count)]
        async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=False) as chunks:
            reading = await read_payloads(stored.source, chunks, Mode.CHUNK_MAJOR, resident)
        expected = b"".join(chunk.tobytes() for chunk in resident) + CHUNKS[resident_count:].tobytes()
        assert reading.target.tobytes() == expected

    @pytest.mark.parametrize("mode", list(Mode))
    @pytest.mark.parametrize("offset", [0, 45_000, LAYOUT.chunk_bytes - 1])
    async def test_changed_bytes_are_found_where_they_are(self, stored: SourceBed, mode: Mode, offset: int) -> None:
        """The failure names a row, and a byte of it in the block that was changed; what came before was right."""
        bad = 2
        await stored.damage(KEYS[bad], offset)
        async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=False) as chunks:
            reading = await read_payloads(stored.source, chunks, mode)
            assert reading.payload is not None
            assert reading.payload.chunk_at(reading.failed_target) == bad
            if mode is Mode.LAYER_MAJOR:
                layers = {at // LAYOUT.per_layer_chunk_bytes for at in block_around(offset)}
                assert reading.payload.group.index == min(layers)
        expected = CHUNKS.tobytes() if mode is Mode.CHUNK_MAJOR else layer_major(CHUNKS)
        assert reading.target[: reading.payload.target_offset].tobytes() == expected[: reading.payload.target_offset]

    async def test_changed_bytes_of_one_chunk_do_not_stop_another(self, stored: SourceBed) -> None:
        await stored.damage(KEYS[2], 0)
        others = [key for index, key in enumerate(KEYS) if index != 2]
        async with stored.source.open_chunks(BUCKET, others, LAYOUT, prefix_only=False) as chunks:
            reading = await read_payloads(stored.source, chunks)
        assert reading.failure is None
        assert reading.target.tobytes() == CHUNKS[[0, 1, 3, 4]].tobytes()

    async def test_a_whole_extent_is_read_and_proved(self, stored: SourceBed) -> None:
        async with stored.source.open_chunks(BUCKET, KEYS[:1], LAYOUT, prefix_only=False) as chunks:
            whole = bytearray(LAYOUT.chunk_bytes)
            for extent in chunks[0]:
                view = memoryview(whole)[extent.object_offset : extent.object_offset + extent.nbytes]
                await asyncio.to_thread(stored.source.read_extent, extent, view)
        assert bytes(whole) == CHUNKS[0].tobytes()

    async def test_a_whole_extent_with_changed_bytes_is_refused(self, stored: SourceBed) -> None:
        await stored.damage(KEYS[1], 33_000)
        async with stored.source.open_chunks(BUCKET, KEYS[1:2], LAYOUT, prefix_only=False) as chunks:
            extent = next(e for e in chunks[0] if e.object_offset <= 33_000 < e.object_offset + e.nbytes)
            with pytest.raises(CorruptExtentError):
                await asyncio.to_thread(stored.source.read_extent, extent, memoryview(bytearray(extent.nbytes)))


def block_around(offset: int) -> range:
    """The bytes of the block that holds the byte at `offset`."""
    start = offset // BLOCK_BYTES * BLOCK_BYTES
    return range(start, min(start + BLOCK_BYTES, LAYOUT.chunk_bytes))


class CachedSourceRules(ChunkSourceRules):
    """The rules of a source that is a cache before a home."""

    async def test_a_damaged_chunk_is_not_matched_until_it_is_written_again(self, stored: SourceBed) -> None:
        """Here it is matched all the time: the next delivery brings it from the home again."""
        async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=False) as chunks:
            stored.source.note_damage(BUCKET, KEYS[2], chunks[2])
        assert await stored.source.matched(BUCKET, KEYS) == CHUNK_COUNT
        async with stored.source.open_chunks(BUCKET, KEYS, LAYOUT, prefix_only=False) as chunks:
            reading = await read_payloads(stored.source, chunks)
        assert reading.failure is None
        assert reading.target.tobytes() == CHUNKS.tobytes()
