"""Compaction beneath a server at work: deliveries, with what it remembers of the index; and the command."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from descriptors.descriptor import Delivery
from descriptors.units import MIB
from nixl_client.transports.shared_memory import allocate
from objectcache.cli.main import run
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.requests import request
from tests.support.servers import LocalStack, ucx_for
from tests.support.waiting import eventually

MOVES = 6


def files_of(local: LocalStack, keys: list[str]) -> set[str]:
    sql = f"SELECT file_id FROM objects JOIN extents USING (version) WHERE key IN ({','.join('?' * len(keys))})"
    database = sqlite3.connect(local.storage.settings.data_dir / "index.sqlite3")
    found = {row[0] for row in database.execute(sql, keys)}
    database.close()
    return found


@pytest.mark.slow
def test_deliveries_bring_the_right_bytes_while_their_chunks_are_moved(tmp_path: Path, transport: str) -> None:
    """The same descriptor again and again: where its chunks lie has been looked up before, and is wrong by then."""
    settings = {"compact_interval_s": 0.01, "compact_live_fraction_max": 0.95, "compact_bytes_per_s": 1000.0 * MIB}
    keys, chunks = make_chunks(N, LAYOUT)
    passing, others = make_chunks(N, LAYOUT, seed=2)
    with LocalStack(tmp_path / "data", ucx=ucx_for(transport), **settings) as local:
        local.call(local.storage.objects.create_bucket("OWNERKEY", "chunks"))
        buffer = allocate(LAYOUT.delivery_bytes(N))
        with local.client("chunks", transport) as client:
            client.put_chunks(keys, list(chunks))
            moves: list[set[str]] = [files_of(local, keys)]

            def is_moved_often() -> bool:
                client.put_chunks(passing, list(others))
                local.storage.store.segments.close()
                request(local.url, "DELETE", f"/chunks/{passing[len(moves)]}")
                buffer[:] = 0
                fetch = client.fetch(keys, LAYOUT, buffer, delivery=Delivery.LAYER_MAJOR)
                fetch.wait(30)
                assert np.array_equal(
                    buffer.reshape(LAYOUT.num_layers, N, -1).transpose(1, 0, 2).reshape(N, -1), chunks
                )
                assert client.lookup(keys) == N
                if files_of(local, keys) != moves[-1]:
                    moves.append(files_of(local, keys))
                return len(moves) > MOVES

            assert eventually(is_moved_often)
        assert eventually(lambda: local.storage.store.files.pinned_count == 0)


def test_the_command_leaves_a_store_alone_that_is_being_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own sweep would take the server's unfinished files for leftovers; the server compacts by itself."""
    words = ["compact", "--data", str(tmp_path / "data")]
    assert run(words) == 2
    keys, chunks = make_chunks(N, LAYOUT)
    with LocalStack(tmp_path / "data") as local:
        local.call(local.storage.objects.create_bucket("OWNERKEY", "chunks"))
        with local.client("chunks", "http") as client:
            client.put_chunks(keys, list(chunks))
            request(local.url, "DELETE", f"/chunks/{keys[0]}")
            assert run(words) == 1
            assert "is in use by another server" in capsys.readouterr().err
            assert client.lookup(keys[1:]) == N - 1
    assert run([*words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["damaged"] == []
    assert run(["scrub", *words[1:]]) == 0
