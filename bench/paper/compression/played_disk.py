"""A server of ours in this process whose home is as slow as a disk that is played: its reads wait, and everything else
is the product.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from descriptors.layout import ChunkLayout
from descriptors.presence import Presence
from gateway.app import GatewaySettings
from gateway.s3.credentials import Credential
from nixl_client.client import Client
from objectcache.calibration.servers import BUCKET
from objectcache.cli.listening import Listen
from objectcache.cli.serve import Together
from storage_server.cache.policies.choice import Eviction
from storage_server.cache.policies.utility import UtilitySettings
from storage_server.planning.extent import Extent
from storage_server.planning.forms import Takes
from storage_server.planning.rows import RESIDENT, Row, Rows, SourceTable
from storage_server.planning.source import ChunkSource, Pins, RowFailure
from storage_server.settings import StorageSettings

START_S = 60.0
_T = TypeVar("_T")


class PlayedDisk:
    """A ChunkSource whose reads take as long as at `bytes_per_s`, one after the other."""

    def __init__(self, source: ChunkSource, bytes_per_s: float) -> None:
        self._source = source
        self._bytes_per_s = bytes_per_s
        self._turn = threading.Lock()

    def open_chunks(
        self, bucket: str, keys: Sequence[str], layout: ChunkLayout, *, prefix_only: bool, reader: Takes | None = None
    ) -> AbstractAsyncContextManager[list[list[Extent]]]:
        return self._source.open_chunks(bucket, keys, layout, prefix_only=prefix_only, reader=reader)

    async def matched(self, bucket: str, keys: Sequence[str], lease_s: float = 0.0, reader: Takes | None = None) -> int:
        return await self._source.matched(bucket, keys, lease_s, reader)

    async def present(
        self, bucket: str, keys: Sequence[str], lease_s: float = 0.0, reader: Takes | None = None
    ) -> tuple[Presence, bool]:
        return await self._source.present(bucket, keys, lease_s, reader)

    def resolve(self, bucket: str, keys: Sequence[str]) -> AsyncGenerator[list[list[Extent] | None], None]:
        return self._source.resolve(bucket, keys)

    def is_cut_off(self, bucket: str) -> bool:
        """As the source says."""
        return self._source.is_cut_off(bucket)

    @property
    def generation(self) -> int:
        return self._source.generation

    def keep(self, extents: Sequence[Extent], since: int) -> Pins | None:
        return self._source.keep(extents, since)

    def read_rows(self, table: SourceTable, rows: Rows, address: int, *, past_cache: bool) -> RowFailure | None:
        self._wait(int(rows[rows[:, Row.SOURCE] != RESIDENT, Row.NBYTES].sum()))
        return self._source.read_rows(table, rows, address, past_cache=past_cache)

    def read_extent(self, extent: Extent, view: memoryview, start: int = 0) -> None:
        self._wait(len(view))
        self._source.read_extent(extent, view, start)

    def note_damage(self, bucket: str, key: str, extents: Sequence[Extent]) -> None:
        self._source.note_damage(bucket, key, extents)

    def _wait(self, nbytes: int) -> None:
        if nbytes:
            with self._turn:
                time.sleep(nbytes / self._bytes_per_s)


class PlayedServer:
    """A running one, with an empty bucket."""

    def __init__(self, together: Together, loop: asyncio.AbstractEventLoop, credential: Credential) -> None:
        self._together = together
        self._loop = loop
        self._credential = credential

    def client(self) -> Client:
        """Our client, over http."""
        key = self._credential
        return Client(
            self._together.url, BUCKET, access_key=key.access_key, secret_key=key.secret_key, transport="http"
        )

    def metrics(self) -> str:
        """The metrics page of its storage side."""
        return _called(self._loop, self._together.storage.metrics(self._credential.access_key))


@contextmanager
def played_server(
    folder: Path,
    disk_bytes_per_s: float,
    dram_bytes: int,
    compression: UtilitySettings | None,
    eviction: Eviction = Eviction.REUSE_VALUE,
) -> Iterator[PlayedServer]:
    """Serve from `folder` in a thread of this process."""
    settings = StorageSettings(folder, dram_bytes=dram_bytes, compression=compression, theta_bytes=0, eviction=eviction)
    credential = Credential("OC" + secrets.token_hex(9).upper(), secrets.token_urlsafe(30))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    together = Together(
        settings, GatewaySettings(), [credential], Listen(),
        wrap_source=lambda source: PlayedDisk(source, disk_bytes_per_s),
    )  # fmt: skip
    try:
        _called(loop, together.start())
        try:
            _called(loop, together.storage.objects.create_bucket(credential.access_key, BUCKET))
            yield PlayedServer(together, loop, credential)
        finally:
            _called(loop, together.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(START_S)
        loop.close()


def _called(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run_coroutine_threadsafe(work, loop).result(START_S)
