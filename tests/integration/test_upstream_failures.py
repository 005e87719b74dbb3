"""A service upstream that is slow, breaks off or is gone, here a second ObjectCache behind a proxy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from descriptors.descriptor import Delivery
from descriptors.errors import ObjectCacheError
from descriptors.layout import ChunkLayout
from storage_server.settings import UpstreamSettings
from tests.support.chunks import make_chunks
from tests.support.faulty_upstream import Fault, FaultyUpstream, start_of_range
from tests.support.requests import OWNER
from tests.support.servers import LocalStack, eventually

LAYOUT = ChunkLayout(6, 16, 70_000)
N = 9
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "groups": {"fetches_max": 4},
    "straight into files": {"fetches_max": 4, "landing_bytes": 0},
}
"""How chunks come: each in one request, or in groups of layers since there are more chunks than connections."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """The service upstream."""
    with LocalStack(tmp_path_factory.mktemp("home")) as running:
        running.call(running.storage.objects.create_bucket(OWNER[0], "chunks"))
        yield running


@pytest.fixture(scope="module")
def stored(home: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], np.ndarray]:
    """Chunks that were put through another server of ours, so that they carry their proof, and are upstream alone."""
    keys, chunks = make_chunks(N, LAYOUT)
    with (
        LocalStack(tmp_path_factory.mktemp("writer"), upstream=UpstreamSettings(home.url, *OWNER)) as writer,
        writer.client("chunks", "http") as client,
    ):
        client.put_chunks(keys, list(chunks))
    return keys, chunks


@pytest.fixture
def upstream(home: LocalStack) -> Iterator[FaultyUpstream]:
    """The way from us to the service."""
    with FaultyUpstream(home.url) as running:
        yield running


@pytest.fixture
def cold(request: pytest.FixtureRequest, upstream: FaultyUpstream, tmp_path: Path) -> Iterator[LocalStack]:
    """Us, with nothing in the cache. The parameter is one of WAYS."""
    options = {"connect_timeout_s": 3.0, "read_timeout_s": 1.0, **WAYS[getattr(request, "param", "whole")]}
    with LocalStack(tmp_path / "cold", upstream=UpstreamSettings(upstream.url, *OWNER, **options)) as running:
        yield running


Stored = tuple[list[str], np.ndarray]


@pytest.mark.parametrize("cold", WAYS, indirect=True)
@pytest.mark.parametrize("fault", [Fault.DRIPPING, Fault.TRUNCATED])
def test_what_breaks_off_or_drips_is_asked_for_again_from_where_it_ended(
    upstream: FaultyUpstream, stored: Stored, cold: LocalStack, fault: Fault
) -> None:
    """The delivery does not hear of it. What has been received is not asked for again."""
    keys, chunks = stored
    failed = set[tuple[str, str]]()

    def once(request: web.Request) -> Fault | None:
        asked = request.path, request.headers.get("Range", "")
        if request.method != "GET" or start_of_range(request) is None or request.path in dict(failed):
            return None
        failed.add(asked)
        return fault

    upstream.choose = once
    with cold.client("chunks", "http") as client:
        buffer = np.zeros(chunks.nbytes, np.uint8)
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(60)
        assert np.array_equal(buffer, chunks.ravel())
    assert len(failed) == N
    assert eventually(lambda: cold.storage.upstream.fetches.running_count == 0)
    assert cold.storage.upstream.fetches.fetched_bytes == chunks.nbytes
    for key in keys:
        ranges = [asked for method, path, asked in upstream.seen if method == "GET" and path.endswith(key)]
        starts = [int(asked.removeprefix("bytes=").split("-")[0]) for asked in ranges]
        assert starts == sorted(starts)
        if len(starts) == 2:  # one request for all, and one for the rest of it
            assert starts[1] > 0


@pytest.mark.parametrize("cold", WAYS, indirect=True)
def test_a_service_that_drips_for_ever_holds_nobody_up_for_ever(
    upstream: FaultyUpstream, stored: Stored, cold: LocalStack
) -> None:
    """A byte comes long before each time limit of a read ends."""
    keys, chunks = stored
    upstream.choose = lambda request: Fault.DRIPPING if start_of_range(request) is not None else None
    with cold.client("chunks", "http") as client:
        buffer = np.zeros(chunks.nbytes, np.uint8)
        with pytest.raises(ObjectCacheError):
            client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(60)
        assert eventually(lambda: cold.storage.upstream.fetches.running_count == 0, 60)
        upstream.release()
        client.fetch(keys, LAYOUT, buffer, delivery=Delivery.CHUNK_MAJOR).wait(60)
        assert np.array_equal(buffer, chunks.ravel())
