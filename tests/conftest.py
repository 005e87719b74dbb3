"""Fixtures: running servers, together and apart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from storage_server.home.embedded import EmbeddedStore
from storage_server.planning.durability import Durability
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.faulty_disk import FaultyDisk
from tests.support.servers import LocalStack, Stack, stack, ucx_of
from tests.support.store_bed import opened

ENVIRONMENTS = frozenset({"engines", "clients"})
"""The folders whose tests need environments of their own."""

# no test is timed: a machine that is busy with others may stand still for seconds
settings.register_profile("untimed", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("untimed"), max_examples=10)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs more than `.venv` by its folder."""
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in ENVIRONMENTS:
            item.add_marker("environments")


@pytest.fixture(scope="session", params=["together", "apart"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Both arrangements of the processes; tests that use this run against each."""
    with stack(request.param, tmp_path_factory.mktemp(request.param)) as running:
        running.s3().create_bucket(Bucket="chunks")
        yield running


@pytest.fixture
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalStack]:
    """Servers in this process, with small payloads so that a few kilobytes make several of them. UCX is there where the
    test's `transport` is ucx, or it is marked `with_ucx`.
    """
    settings: dict[str, object] = {
        "aggregation_bytes": 8192,
        "window_bytes": 32768,
        "staging_bytes": 65536,
        "stall_timeout_s": 5.0,
    }
    with LocalStack(tmp_path / "data", ucx=ucx_of(request), **settings) as running:
        running.call(running.storage.objects.create_bucket("OWNERKEY", "chunks"))
        yield running


@pytest.fixture
def keys(local: LocalStack) -> list[str]:
    """Keys of N stored chunks of LAYOUT: `make_chunks(N, LAYOUT)`."""
    made, chunks = make_chunks(N, LAYOUT)
    with local.client("chunks", "http") as client:
        client.put_chunks(made, list(chunks))
    return made


@pytest.fixture(params=["ucx", "shm", "http"])
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport."""
    return str(request.param)


@pytest.fixture(params=["strict", "relaxed"])
async def store(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[EmbeddedStore]:
    """An embedded store on a disk that can be made to fail, in either durability."""
    made = await opened(tmp_path / "data", FaultyDisk(), durability=Durability(request.param))
    await made.objects.create_bucket("k", "bbb")
    yield made
    assert made.files.pinned_count == 0
    made.close()
