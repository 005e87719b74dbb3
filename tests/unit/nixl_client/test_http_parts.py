"""How a prefix is cut into parts for several connections."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from descriptors.descriptor import Delivery, Descriptor
from nixl_client.fetch.http import SPLIT_BYTES_MIN, split_request

REQUEST_ID = "0" * 32


@given(st.integers(1, 40), st.integers(1, 32), st.data())
def test_parts_are_runs_of_all_chunks(chunk_count: int, connections: int, data: st.DataObject) -> None:
    keys = tuple(f"k{index}" for index in range(chunk_count))
    descriptor = Descriptor(keys, 2, 16, SPLIT_BYTES_MIN, request_id=REQUEST_ID)
    wanted = data.draw(st.integers(1, chunk_count))
    parts = split_request(descriptor, connections, wanted)
    assert [key for part in parts for key in part.descriptor.chunk_keys] == list(keys[:wanted])
    assert [part.first_chunk for part in parts] == [keys.index(part.descriptor.chunk_keys[0]) for part in parts]
    sizes = [part.descriptor.chunk_count for part in parts]
    assert len(parts) == min(connections, wanted)
    assert max(sizes) - min(sizes) <= 1
    if wanted < chunk_count:
        again = [part for attempt in (1, 2) for part in split_request(descriptor, connections, wanted, attempt)]
        assert len({part.descriptor.request_id for part in again}) == len(again)
    if len(parts) > 1:
        assert {part.descriptor.delivery for part in parts} == {Delivery.LAYER_MAJOR}


def test_what_is_small_goes_whole() -> None:
    descriptor = Descriptor(("a", "b"), 2, 16, 100, request_id=REQUEST_ID)
    (part,) = split_request(descriptor, 8, 2)
    assert part.descriptor is descriptor
