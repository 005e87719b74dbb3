"""Further gateway processes beside a server. They read the store themselves and send all other calls to its owner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence

from descriptors.peer_auth import PeerSecrets
from descriptors.peer_calls import role_of
from descriptors.storage_api import ObjectsApi
from gateway.storage_client import RemoteStorage
from objectcache.adapters.metrics import forget_process
from storage_server.kernel.beside import StoreBeside
from storage_server.settings import StorageSettings

RESTART_DELAY_S = 1.0
READ_BYTES = 4096
STOP_TIMEOUT_S = 10.0
BEAT_S = 1.0
"""A worker's event loop writes a byte to its output in this interval."""
SILENT_S = 5.0
SILENT_TIMES_MAX = 3
"""A worker that is silent for SILENT_S so many times in a row is killed: the kernel goes on to give it connections.
Once alone proves nothing, because the owner itself may have been stopped.
"""
_log = logging.getLogger(__name__)


class StorageBeside(RemoteStorage):
    """A StorageApi for a gateway on the storage server's machine: reads are local, all other calls go to its socket."""

    def __init__(self, endpoint: str, secrets: PeerSecrets, settings: StorageSettings) -> None:
        super().__init__(endpoint, secrets)
        self._store = StoreBeside(settings.data_dir, settings.open_files_max, settings.buffer_bytes)
        reads, remote = self._store.reads, self.objects
        self.objects: ObjectsApi = role_of(
            "objects", lambda call: getattr(reads, call.method, None) or getattr(remote, call.method)
        )

    async def start(self) -> None:
        await self._store.start()
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self._store.close()


def worker_storage(endpoint: str, secrets: PeerSecrets, settings: StorageSettings) -> RemoteStorage:
    """A worker's way to the storage. Objects of an upstream service are not in the directory: all calls go to the
    owner's socket.
    """
    return (
        RemoteStorage(endpoint, secrets)
        if settings.upstream is not None
        else StorageBeside(endpoint, secrets, settings)
    )


class Workers:
    """Child processes that each run `command`. A child that ends is started again, until `stop`."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command = command
        self._count = count
        self._keepers: list[asyncio.Task[None]] = []
        self._running: set[asyncio.subprocess.Process] = set()

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to every child."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def start(self) -> None:
        """Start all children and wait until each is ready. Raises ChildProcessError when a child ends instead."""
        loop = asyncio.get_running_loop()
        ready: list[asyncio.Future[None]] = [loop.create_future() for _ in range(self._count)]
        self._keepers = [asyncio.create_task(self._keep(future)) for future in ready]
        await asyncio.gather(*ready)

    async def stop(self) -> None:
        """End every child. Each child has STOP_TIMEOUT_S to finish."""
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
                if line:  # before that a signal would end it
                    self._running.add(process)
                    await _kill_if_silent(process)
                status = await process.wait()
            except asyncio.CancelledError:
                await _end(process)
                raise
            finally:
                self._running.discard(process)
            await asyncio.to_thread(forget_process, process.pid)
            if not ready.done():
                ready.set_exception(ChildProcessError(f"a worker ended with status {status} before it was ready"))
                return
            _log.warning("worker %d ended with status %d and is started again", process.pid, status)
            await asyncio.sleep(RESTART_DELAY_S)


def beat(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    """In a worker: write a byte to `fd` now and in each BEAT_S. An owner that does not read is not waited for."""
    os.set_blocking(fd, False)
    with contextlib.suppress(OSError):
        os.write(fd, b".")
    loop.call_later(BEAT_S, beat, loop, fd)


async def _kill_if_silent(process: asyncio.subprocess.Process) -> None:
    """Read a worker's output until it ends. Kill a worker whose event loop stands still."""
    silent_times = 0
    while process.stdout is not None and silent_times < SILENT_TIMES_MAX:
        try:
            async with asyncio.timeout(SILENT_S):
                if not await process.stdout.read(READ_BYTES):
                    return
            silent_times = 0
        except TimeoutError:
            silent_times += 1
    _log.warning("worker %d has not moved for %.0f s and is killed", process.pid, SILENT_TIMES_MAX * SILENT_S)
    process.kill()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
