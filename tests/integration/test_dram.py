"""Deliveries from the DRAM tier are the stored bytes."""

from __future__ import annotations

import numpy as np
import pytest

from descriptors.descriptor import Delivery
from descriptors.errors import ObjectCacheError
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.servers import LocalStack
from tests.support.waiting import eventually


@pytest.mark.slow
def test_deliveries_from_memory_are_the_stored_bytes(local: LocalStack, keys: list[str], transport: str) -> None:
    """The second fetch reads no file, and what was overwritten meanwhile is not served from memory."""
    chunks = make_chunks(N, LAYOUT)[1]
    _, newer = make_chunks(N, LAYOUT, seed=7)
    with local.client("chunks", transport) as client:
        buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))

        def fetched() -> bytes:
            buffer[:] = 0
            client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
            return buffer.tobytes()

        assert fetched() == chunks.tobytes()
        assert eventually(lambda: local.storage.dram.residency.resident_count == N)
        read = local.storage.store.files.open.lent
        local.storage.store.files.open.lent = None  # type: ignore[assignment,method-assign]
        assert fetched() == chunks.tobytes()
        local.storage.store.files.open.lent = read  # type: ignore[method-assign]
        client.put_chunks(keys[:3], list(newer[:3]))
        assert fetched() == np.concatenate([newer[:3], chunks[3:]]).tobytes()
        assert eventually(lambda: local.storage.store.files.pinned_count == 0)


def test_damaged_bytes_do_not_come_in(local: LocalStack, keys: list[str]) -> None:
    """They are proved on the way; the rest of the prefix does."""
    with local.client("chunks", "shm") as client:
        buffer = client.allocate_buffer(LAYOUT.delivery_bytes(N))
        local.damage("chunks", keys[4], 50_000)
        with pytest.raises(ObjectCacheError):
            client.fetch(keys, LAYOUT, buffer).wait(30)
        assert eventually(lambda: local.storage.dram.residency.resident_count == N - 1)
        with pytest.raises(ObjectCacheError):
            client.fetch(keys, LAYOUT, buffer).wait(30)
