"""Every tier before home keeps the same promises, and a further one is a single file (tests/support/folder_tier.py)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from descriptors.objects import Attributes, ObjectInfo
from objectcache.adapters.memory_area import SharedArea
from storage_server.delivery.gather.landing import Landing
from storage_server.home.further_tier import FurtherTier
from storage_server.home.remote_dram.remote_dram import RemoteDram
from storage_server.home.rules.proof import make_proof
from storage_server.home.rules.remote_entry import RemoteEntry
from storage_server.planning.block_checksums import BlockChecksums
from storage_server.settings import RemoteDramSettings
from tests.support.folder_tier import FolderTier
from tests.support.played_mooncake import PlayedMooncake
from tests.support.waiting import until

NBYTES = 100_000
KEY, OTHER = "a" * 64, "b" * 64
Make = Callable[[], FurtherTier]


def made_of_memory() -> Make:
    store = PlayedMooncake()

    async def connect(_: RemoteDramSettings, areas: Sequence[SharedArea]) -> PlayedMooncake:
        return store

    return lambda: RemoteDram(RemoteDramSettings("mooncake://127.0.0.1:1"), "home", 3600.0, connect)


@pytest.fixture(params=["remote DRAM", "a folder"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes the tier of one server; those of all servers reach the same chunks."""
    return made_of_memory() if request.param == "remote DRAM" else lambda: FolderTier(tmp_path)


class Server:
    """One server's tier, and its landing memory."""

    def __init__(self, tier: FurtherTier, landing: Landing) -> None:
        self.tier, self.landing = tier, landing

    def admit(self, data: bytes, key: str = KEY, seen_at: float | None = None) -> None:
        blocks = BlockChecksums()
        blocks.update(memoryview(data))
        info = ObjectInfo(key, len(data), "e" * 32, 5.0, Attributes({"content-type": "x"}))
        landed = self.landing.take("bucket", NBYTES)
        assert landed is not None
        landed.view[:] = data
        self.tier.admit(
            RemoteEntry("bucket", info, make_proof(NBYTES, blocks.packed()), seen_at or time.time()), landed
        )
        landed.release()

    async def read(self, key: str = KEY) -> tuple[RemoteEntry, bytes] | None:
        landed = self.landing.take("bucket", NBYTES)
        assert landed is not None
        try:
            entry = await self.tier.read("bucket", key, landed)
            return None if entry is None else (entry, bytes(landed.view))
        finally:
            landed.release()


@asynccontextmanager
async def servers(make: Make, count: int) -> AsyncIterator[list[Server]]:
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(count):
            tier = make()
            landing = tier.landing(8 << 20) or Landing(8 << 20)
            await tier.start()
            stack.push_async_callback(tier.close)
            await until(lambda tier=tier: tier.may_have("bucket", KEY))  # type: ignore[misc]
            made.append(Server(tier, landing))
        yield made
        for each in made:
            await until(lambda each=each: each.landing.used_bytes == 0)  # type: ignore[misc]


async def test_what_one_server_admits_all_can_read(make: Make) -> None:
    async with servers(make, 2) as (one, other):
        assert await other.read() is None
        one.admit(b"1" * NBYTES)
        await until(lambda: one.landing.used_bytes == 0)
        found = await other.read()
        assert found is not None
        assert (found[0].info.key, found[0].info.attributes.headers, found[1]) == (
            KEY,
            {"content-type": "x"},
            b"1" * NBYTES,
        )
        assert await other.read(OTHER) is None


async def test_what_is_removed_is_read_by_nobody(make: Make) -> None:
    async with servers(make, 2) as (one, other):
        one.admit(b"1" * NBYTES)
        one.admit(b"2" * NBYTES, OTHER)
        await until(lambda: one.landing.used_bytes == 0)
        await other.tier.remove("bucket", [KEY])
        assert [await each.read() for each in (one, other)] == [None, None]
        assert await one.read(OTHER) is not None


async def test_what_is_being_written_when_it_is_removed_does_not_stay(make: Make) -> None:
    async with servers(make, 1) as (one,):
        one.admit(b"1" * NBYTES)
        await one.tier.remove("bucket", [KEY])
        await until(lambda: one.landing.used_bytes == 0)
        assert await one.read() is None


async def test_a_chunk_that_has_changed_is_read_as_it_is_since(make: Make) -> None:
    async with servers(make, 1) as (one,):
        one.admit(b"1" * NBYTES, seen_at=time.time() - 10)
        await until(lambda: one.landing.used_bytes == 0)
        one.tier.distrust("bucket", [KEY])
        assert await one.read() is None
        one.admit(b"2" * NBYTES, seen_at=time.time() + 1)
        await until(lambda: one.landing.used_bytes == 0)
        found = await one.read()
        assert found is not None
        assert found[1] == b"2" * NBYTES


async def test_a_chunk_whose_bytes_were_wrong_is_not_read_again(make: Make) -> None:
    async with servers(make, 1) as (one,):
        one.admit(b"1" * NBYTES)
        await until(lambda: one.landing.used_bytes == 0)
        one.tier.found_wrong("bucket", KEY)
        assert await one.read() is None
