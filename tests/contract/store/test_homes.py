"""Every home that a cache may stand before keeps the rules."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from storage_server.home.service import HomeObjects
from storage_server.settings import UpstreamSettings
from tests.contract.store.home_rules import BUCKET, OWNER_KEY, HomeRules
from tests.support.requests import OWNER
from tests.support.servers import LocalStack
from tests.support.stores import shared_directory, upstream_storage


@pytest.mark.needs_server
class TestUpstream(HomeRules):
    """Another S3 service, here another ObjectCache."""

    @pytest.fixture
    async def home(self, tmp_path: Path) -> AsyncIterator[HomeObjects]:
        with LocalStack(tmp_path / "data") as service:
            async with upstream_storage(UpstreamSettings(service.url, *OWNER)) as storage:
                await storage.objects.create_bucket(OWNER_KEY, BUCKET)
                yield storage.objects


class TestSharedDirectory(HomeRules):
    """A directory on a shared file system."""

    @pytest.fixture
    async def home(self, tmp_path: Path) -> AsyncIterator[HomeObjects]:
        async with shared_directory(tmp_path / "shared", tmp_path / "data" / "shared") as shared:
            await shared.objects.create_bucket(OWNER_KEY, BUCKET)
            yield shared.objects
            assert shared.files.pinned_count == 0
