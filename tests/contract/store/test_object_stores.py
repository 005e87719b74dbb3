"""Every store of objects and uploads keeps the rules: the embedded store, the ways to it from other processes, and the
wrappers with their faults switched off.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from descriptors import chunk_names
from gateway.trace import TimedStorage
from objectcache.cli.workers import StorageBeside
from storage_server.planning.durability import Durability
from storage_server.service.http_api import StorageHttp
from storage_server.settings import UpstreamSettings, Write
from tests.contract.store.bucket_rules import BucketRules
from tests.contract.store.object_rules import ObjectRules
from tests.contract.store.rules import BUCKET, OTHER_BUCKET, Feature
from tests.contract.store.upload_rules import UploadRules
from tests.support.foreign_services import moto_service, named_service, needs_named_service
from tests.support.requests import OWNER
from tests.support.servers import LocalStack
from tests.support.stores import (
    SECRET,
    DamagedStorage,
    FailingStorage,
    SlowStorage,
    TakingTurns,
    cluster_storage,
    embedded_storage,
    emptied,
    listening,
    remote_storage,
    shared_directory,
    upstream_storage,
)
from tests.support.waiting import until


class TestEmbedded(BucketRules, ObjectRules, UploadRules):
    """In both durabilities, which differ in how a change reaches the disk."""

    @pytest.fixture(params=list(Durability), ids=lambda durability: durability.value)
    async def storage(self, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
        async with embedded_storage(tmp_path / "data", durability=request.param) as storage:
            yield storage
            await until(lambda: storage.store.files.pinned_count == 0)  # equal bytes are compared behind the answers


class TestWrapped(BucketRules, ObjectRules, UploadRules):
    """What every gateway puts around its storage, and all wrappers with their faults off, one around the other."""

    @pytest.fixture
    async def storage(self, tmp_path: Path) -> AsyncIterator[Any]:
        async with embedded_storage(tmp_path / "data", durability=Durability.RELAXED) as storage:
            yield TimedStorage(SlowStorage(FailingStorage(DamagedStorage(storage))))
            await until(lambda: storage.store.files.pinned_count == 0)  # equal bytes are compared behind the answers


@pytest.mark.needs_server
class TestRemote(BucketRules, ObjectRules, UploadRules):
    """A gateway's way to a storage server in another process: the peer protocol, here over loopback."""

    @pytest.fixture
    async def storage(self, tmp_path: Path) -> AsyncIterator[Any]:
        async with embedded_storage(tmp_path / "data") as storage, remote_storage(storage) as remote:
            yield remote


@pytest.mark.needs_server
class TestCluster(BucketRules, ObjectRules, UploadRules):
    """A gateway over three storage servers before one upstream service; every call goes to the home of its key."""

    lacks = frozenset({Feature.BUCKET_OWNERS, Feature.DOT_KEYS})

    @pytest.fixture
    async def storage(self, tmp_path: Path) -> AsyncIterator[Any]:
        with LocalStack(tmp_path / "home") as home:
            async with cluster_storage(tmp_path, UpstreamSettings(home.url, *OWNER)) as storage:
                yield storage


@pytest.mark.needs_server
class TestBeside(BucketRules, ObjectRules, UploadRules):
    """A worker's way: it reads the store's index and files by itself, and sends every change to the store's owner."""

    @pytest.fixture
    async def storage(self, tmp_path: Path) -> AsyncIterator[Any]:
        owner = embedded_storage(tmp_path / "data", punch_delay_s=30.0)
        async with owner as storage, listening(StorageHttp(storage, SECRET).server()) as url:
            worker = StorageBeside(url, SECRET, storage.settings)
            await worker.start()
            yield worker
            await worker.close()


@pytest.mark.needs_server
class TestUpstream(BucketRules, ObjectRules, UploadRules):
    """In front of another S3 service, here another ObjectCache."""

    lacks = frozenset({Feature.BUCKET_OWNERS, Feature.DOT_KEYS})

    @pytest.fixture
    async def storage(self, tmp_path: Path) -> AsyncIterator[Any]:
        with LocalStack(tmp_path / "data") as service:
            async with upstream_storage(UpstreamSettings(service.url, *OWNER)) as storage:
                yield storage


@pytest.mark.needs_server
class TestUpstreamOfChunks(BucketRules, ObjectRules, UploadRules):
    """The same where every key names a chunk, so that reads come from the cache; and where no chunk that is written
    back gets upstream before something needs it there.
    """

    lacks = frozenset({Feature.BUCKET_OWNERS, Feature.DOT_KEYS, Feature.EXPIRY})

    @pytest.fixture(params=list(Write), ids=lambda write: write.value)
    async def storage(
        self, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[Any]:
        monkeypatch.setattr(chunk_names, "CHUNK_KEY", re.compile(".*", re.DOTALL))
        with LocalStack(tmp_path / "data") as service:
            settings = UpstreamSettings(service.url, *OWNER, write=request.param)
            async with embedded_storage(tmp_path / "front", upstream=settings) as storage:
                storage.upstream.write_back.pause()
                yield storage


class TestSharedDirectory(BucketRules, ObjectRules, UploadRules):
    """A directory on a shared file system, of which two servers answer in turn."""

    @pytest.fixture
    async def storage(self, tmp_path: Path) -> AsyncIterator[Any]:
        root = tmp_path / "shared"
        async with (
            shared_directory(root, tmp_path / "data1" / "shared") as one,
            shared_directory(root, tmp_path / "data2" / "shared") as other,
        ):
            yield TakingTurns((one, other))
            assert (one.files.pinned_count, other.files.pinned_count) == (0, 0)


class TestCachedSharedDirectory(BucketRules, ObjectRules, UploadRules):
    """The same behind a cache, where every key names a chunk."""

    lacks = frozenset({Feature.EXPIRY})

    @pytest.fixture
    async def storage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
        monkeypatch.setattr(chunk_names, "CHUNK_KEY", re.compile(".*", re.DOTALL))
        (tmp_path / "shared").mkdir()
        settings = UpstreamSettings(f"file://{tmp_path}/shared")
        async with embedded_storage(tmp_path / "front", upstream=settings) as storage:
            yield storage


MOTO_HAS = (
    Feature.LIFECYCLE,
    Feature.CHECKSUMS,
    Feature.CONDITIONAL_DELETE,
    Feature.KEYS,
    Feature.MISSING_BUCKETS,
    Feature.REPEATED_PARTS,
)
MOTO_LACKS = frozenset(Feature) - frozenset(MOTO_HAS)


@pytest.fixture(scope="module")
def moto() -> Iterator[UpstreamSettings]:
    """A service of others' making."""
    with moto_service() as settings:
        yield settings


@pytest.mark.needs_server
@pytest.mark.environments
@pytest.mark.timeout(180)
class TestMoto(BucketRules, ObjectRules, UploadRules):
    """In front of moto."""

    lacks = MOTO_LACKS | {Feature.DOT_KEYS}

    @pytest.fixture
    async def storage(self, moto: UpstreamSettings) -> AsyncIterator[Any]:
        async with upstream_storage(moto) as storage:
            await emptied(storage, (BUCKET, OTHER_BUCKET))
            yield storage


SERVICE_LACKS = os.environ.get("OBJECTCACHE_TEST_S3_LACKS", "")


@pytest.mark.needs_server
@needs_named_service
class TestService(BucketRules, ObjectRules, UploadRules):
    """In front of the S3 service that OBJECTCACHE_TEST_S3_ENDPOINT names. Its buckets of the rules' names are deleted
    before each test. OBJECTCACHE_TEST_S3_LACKS names the features that it lacks, with commas between.
    """

    lacks = frozenset(
        {Feature.BUCKET_OWNERS, Feature.DOT_KEYS, *(Feature[name] for name in SERVICE_LACKS.split(",") if name)}
    )

    @pytest.fixture
    async def storage(self) -> AsyncIterator[Any]:
        async with upstream_storage(named_service()) as storage:
            await emptied(storage, (BUCKET, OTHER_BUCKET))
            yield storage
