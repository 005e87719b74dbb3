"""Landing memory, and chunks that come into it."""

from __future__ import annotations

import numpy as np
import pytest

from descriptors.errors import ChunkUnavailable, ErrorCode, ServerError
from descriptors.layout import ChunkLayout
from descriptors.notices import Mode
from descriptors.units import KIB
from objectcache.adapters.caller import CALLER
from storage_server.delivery.gather.coming import Arrival, Coming, ComingExtent, hold_landed, is_whole, with_landed
from storage_server.delivery.gather.landing import MEMORY_FRACTION, Landing
from storage_server.planning.block_checksums import BLOCK_BYTES
from storage_server.planning.extent import Extent
from storage_server.planning.plan import plan_delivery
from storage_server.planning.rows import make_table

CHUNK_BYTES = 10 * KIB
TAKEN_BYTES = 12 * KIB


def test_memory_is_given_back_when_the_last_holder_leaves() -> None:
    landing = Landing(4 * TAKEN_BYTES)
    landed = landing.take("bucket", CHUNK_BYTES)
    assert landed is not None
    assert (landing.used_bytes, len(landed.view)) == (TAKEN_BYTES, CHUNK_BYTES)
    landed.view[:3] = b"abc"
    assert bytes(np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 3).from_address(landed.address))) == b"abc"
    landed.hold()
    landed.release()
    assert landed.is_held
    landed.release()
    assert (landed.is_held, landing.used_bytes) == (False, 0)


def test_one_bucket_cannot_take_all() -> None:
    landing = Landing(4 * TAKEN_BYTES)
    taken = [landing.take("greedy", CHUNK_BYTES) for _ in range(3)]
    assert [landed is not None for landed in taken] == [True, True, False]
    assert landing.used_bytes == MEMORY_FRACTION * landing.nbytes
    assert landing.take("greedy's second", CHUNK_BYTES) is None, "one caller has as many buckets as it likes"
    set_back = CALLER.set("other")
    others = [landing.take("other", CHUNK_BYTES) for _ in range(3)]
    CALLER.reset(set_back)
    assert [landed is not None for landed in others] == [True, False, False]
    for landed in (*taken, *others):
        if landed is not None:
            landed.release()
    assert landing.used_bytes == 0
    assert landing.take("greedy", 2 * TAKEN_BYTES) is not None


def test_without_memory_there_is_no_room() -> None:
    assert Landing(0).take("bucket", 1) is None


def test_extents_in_memory_have_an_address_while_somebody_holds_them() -> None:
    landing = Landing(2 * TAKEN_BYTES)
    landed = landing.take("bucket", CHUNK_BYTES)
    assert landed is not None
    arrival = Arrival(CHUNK_BYTES, landed)
    coming = ComingExtent.of("file", 0, arrival)
    stored = Extent("other", 0, 100, b"abcd")
    assert [is_whole(extent) for extent in (coming, stored)] == [False, True]
    held = hold_landed([coming, stored])
    landed.release()
    assert with_landed([coming, stored], [None, None]) == [landed.address, None]
    assert with_landed([coming, stored], [7, 8]) == [7, 8]
    (only,) = held
    only.release()
    assert with_landed([coming], [None]) == [None]
    assert hold_landed([coming]) == []
    arrival.advance(CHUNK_BYTES, b"")
    assert is_whole(coming)


async def test_what_came_in_part_and_left_the_memory_is_not_there() -> None:
    """Its file was never written, so nothing may be read from there."""
    landing = Landing(2 * BLOCK_BYTES * 4)
    landed = landing.take("bucket", 2 * BLOCK_BYTES)
    assert landed is not None
    arrival = Arrival(2 * BLOCK_BYTES, landed)
    chunks = [[ComingExtent.of("file", 0, arrival)]]
    layout = ChunkLayout(2, 16, BLOCK_BYTES)
    first, second = plan_delivery(Mode.LAYER_MAJOR, layout, 1, 1 << 20).payloads()
    coming = Coming.among(make_table(chunks, [None]), chunks)
    assert coming is not None
    arrival.advance(BLOCK_BYTES, b"abcd")
    with coming:
        await coming.wait_for(first)
        arrival.fail(ServerError(ErrorCode.SLOW_DOWN, "gone", retryable=True))
        await coming.wait_for(first)
        with pytest.raises(ChunkUnavailable):
            await coming.wait_for(second)
        landed.release()
        with pytest.raises(ChunkUnavailable):
            await coming.wait_for(first)
