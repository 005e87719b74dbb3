"""Deduplication beneath a server at work: deliveries and plain reads, with what has been looked up before."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from descriptors.descriptor import Delivery
from nixl_client.transports.shared_memory import allocate
from storage_server.settings import Dedup
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.requests import request
from tests.support.servers import LocalStack, ucx_for
from tests.support.waiting import eventually


def place_count(data: Path) -> int:
    with closing(sqlite3.connect(data / "index.sqlite3")) as db:
        sql = "SELECT count(*) FROM (SELECT DISTINCT file_id, file_offset FROM extents WHERE file_id <> '')"
        return int(db.execute(sql).fetchone()[0])


@pytest.mark.slow
def test_deliveries_bring_the_right_bytes_while_their_chunks_become_one(tmp_path: Path, transport: str) -> None:
    """Two prefixes of equal bytes, named differently, are fetched again and again; then one of them is deleted."""
    keys, chunks = make_chunks(N, LAYOUT)
    named_again = [f"f{key[1:]}" for key in keys]
    with LocalStack(tmp_path / "data", dedup_bytes_per_s=1e12, ucx=ucx_for(transport)) as local:
        local.call(local.storage.objects.create_bucket("OWNERKEY", "chunks"))
        buffer = allocate(LAYOUT.delivery_bytes(N))
        with local.client("chunks", transport) as client:

            def fetched(some: list[str]) -> bool:
                buffer[:] = 0
                client.fetch(some, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(30)
                return buffer.tobytes() == chunks.tobytes()

            def is_shared() -> bool:
                assert fetched(keys)
                assert fetched(named_again)
                return place_count(tmp_path / "data") == N

            client.put_chunks(keys, list(chunks))
            client.put_chunks(named_again, list(chunks))
            assert eventually(is_shared)
            client.delete(keys)
            assert fetched(named_again)
            assert request(local.url, "GET", f"/chunks/{named_again[3]}").body == np.asarray(chunks[3]).tobytes()
        assert eventually(lambda: local.storage.store.files.pinned_count == 0)


def test_tenants_keep_their_own_copies(tmp_path: Path) -> None:
    """Over a server at work, where both put the same bytes at once."""
    keys, chunks = make_chunks(N, LAYOUT)
    with LocalStack(tmp_path / "data", dedup_bytes_per_s=1e12, dedup=Dedup.OWNER) as local:
        for owner in ("OWNERKEY", "OTHERKEY"):
            local.call(local.storage.objects.create_bucket(owner, owner.lower()))
            with local.client(owner.lower(), "http") as client:
                for copy in ("a", "b"):
                    client.put_chunks([f"{copy}{key}" for key in keys], list(chunks))
        assert eventually(lambda: local.storage.store.deduplicator.shared_count == 2 * N)
        assert place_count(tmp_path / "data") == 2 * N
