"""More gateway processes beside a server: they read the store themselves, and send everything else to its owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from descriptors.lifecycle import LifecycleRule
from descriptors.objects import BucketInfo, ListPage, ListRequest, ObjectPart, ReadHead, ReadRequest
from descriptors.storage_api import ObjectRead
from gateway.storage_client import RemoteStorage
from storage_server.settings import StorageSettings
from storage_server.store.beside import StoreBeside

RESTART_DELAY_S = 1.0
STOP_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


class StorageBeside(RemoteStorage):
    """A StorageApi for a gateway on the storage server's own machine: reads are local, the rest goes to its socket."""

    def __init__(self, endpoint: str, secret: bytes, settings: StorageSettings) -> None:
        super().__init__(endpoint, secret)
        self._store = StoreBeside(settings.data_dir, settings.open_files_max, settings.buffer_bytes)

    async def start(self) -> None:
        await self._store.start()
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self._store.close()

    async def head_bucket(self, bucket: str) -> BucketInfo:
        return await self._store.reads.head_bucket(bucket)

    async def list_buckets(self) -> list[BucketInfo]:
        return await self._store.reads.list_buckets()

    async def get_lifecycle(self, bucket: str) -> list[LifecycleRule]:
        return await self._store.reads.get_lifecycle(bucket)

    async def head_object(self, request: ReadRequest) -> ReadHead:
        return await self._store.reads.head_object(request)

    @asynccontextmanager
    async def open_object(self, request: ReadRequest) -> AsyncIterator[ObjectRead]:
        async with self._store.reads.open_object(request) as read:
            yield read

    async def object_parts(self, bucket: str, key: str) -> list[ObjectPart]:
        return await self._store.reads.object_parts(bucket, key)

    async def list_objects(self, request: ListRequest) -> ListPage:
        return await self._store.reads.list_objects(request)


class Workers:
    """Child processes that each run `command`; one that ends is started again until `stop`."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command = command
        self._count = count
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all, and wait until each is ready. Raises ChildProcessError when one ends instead."""
        loop = asyncio.get_running_loop()
        ready: list[asyncio.Future[None]] = [loop.create_future() for _ in range(self._count)]
        self._keepers = [asyncio.create_task(self._keep(future)) for future in ready]
        await asyncio.gather(*ready)

    async def stop(self) -> None:
        """End every child; each has STOP_TIMEOUT_S to finish."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self, ready: asyncio.Future[None]) -> None:
        while True:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
                )
            except OSError as error:
                if not ready.done():
                    ready.set_exception(error)
                    return
                _log.warning("a worker cannot be started: %s", error)
                await asyncio.sleep(RESTART_DELAY_S)
                continue
            try:
                line = await process.stdout.readline() if process.stdout is not None else b""
                if line and not ready.done():
                    ready.set_result(None)
                status = await process.wait()
            except asyncio.CancelledError:
                await _end(process)
                raise
            if not ready.done():
                ready.set_exception(ChildProcessError(f"a worker ended with status {status} before it was ready"))
                return
            _log.warning("worker %d ended with status %d and is started again", process.pid, status)
            await asyncio.sleep(RESTART_DELAY_S)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
