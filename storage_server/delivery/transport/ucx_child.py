"""The life of the ucx process: it is started, gets memory and commands, and is started again when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence

from objectcache.adapters.child_process import child_environment, spawned
from objectcache.adapters.lines import lines_of
from objectcache.adapters.memory_area import SharedArea
from objectcache.adapters.nixl_agent import NixlFailure
from storage_server.delivery.transport.rules.ucx_commands import REPLY_BYTES_MAX, Reply, decode_reply

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
RESTART_S, RESTART_S_MAX = 0.1, 30.0
"""The first and the longest wait before a restart. The wait doubles as long as the process does not live for
RESTART_S_MAX.
"""
_log = logging.getLogger(__name__)


def ucx_environment(environment: Mapping[str, str], devices: str) -> dict[str, str]:
    """The environment of a process with a UCX agent, which listens on `devices`."""
    return {**child_environment(environment, ("UCX_", "NIXL_")), "UCX_NET_DEVICES": devices}


class UcxChild:
    """One process at a time, which gets `areas`. Its replies go to `on_reply`, whose ValueError ends it. `on_end` is
    called when it is gone and nothing of it is in flight, and then `on_gone`, where it was not stopped. Used on one
    event loop.
    """

    def __init__(
        self,
        areas: Sequence[SharedArea],
        devices: str,
        *,
        on_reply: Callable[[Reply], None],
        on_end: Callable[[], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._areas = areas
        self._devices = devices
        self._on_reply = on_reply
        self._on_end = on_end
        self._on_gone = on_gone
        self._child: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.start_count = 0
        """How often it has been started."""

    @property
    def is_running(self) -> bool:
        """Whether commands can be given now."""
        return self._writer is not None

    @property
    def pid(self) -> int | None:
        """Its id."""
        return None if self._child is None else self._child.pid

    def send(self, command: bytes) -> bool:
        """Give it a command; False where it does not run."""
        if self._writer is None:
            return False
        self._writer.write(command)
        return True

    def kill(self) -> None:
        """End it now. It is started again, unless it was stopped."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    async def start(self) -> None:
        """Start it. Raises NixlFailure where UCX cannot run."""
        reader = await self._launch()
        self._keeper = asyncio.create_task(self._keep(reader))

    async def stop(self) -> None:
        """End it for good."""
        self._is_stopping = True
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if self._keeper is not None:
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await asyncio.shield(self._keeper)
            except TimeoutError:
                self.kill()
                await self._keeper

    async def _launch(self) -> asyncio.StreamReader:
        """Start the process and wait until it can take commands. Raises NixlFailure."""
        self.start_count += 1
        environment = ucx_environment(os.environ, self._devices)
        try:
            self._child, ours = await spawned("storage_server.delivery.transport.ucx_engine", self._areas, environment)
        except OSError as error:
            raise NixlFailure(f"the ucx process cannot be started: {error}") from error
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=REPLY_BYTES_MAX)
            async with asyncio.timeout(START_TIMEOUT_S):
                first = decode_reply(await reader.readline())
            if first.reason is not None:
                raise NixlFailure(first.reason)
        except (ValueError, TimeoutError, NixlFailure) as error:
            ours.close()
            self.kill()
            await self._child.wait()
            raise NixlFailure(f"the ucx process does not start: {error}") from error
        except BaseException:
            self.kill()
            raise
        self._writer = writer
        return reader

    async def _keep(self, reader: asyncio.StreamReader) -> None:
        """Read replies, and start the process again when it has ended."""
        pause_s = RESTART_S
        while True:
            began_s = time.monotonic()
            await self._hear(reader)
            await self._gone()
            if self._is_stopping:
                return
            if time.monotonic() - began_s > RESTART_S_MAX:
                pause_s = RESTART_S
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RESTART_S_MAX)
                if self._is_stopping:
                    return
                try:
                    reader = await self._launch()
                    break
                except NixlFailure as failure:
                    _log.warning("%s; it is tried again in %.1f s", failure, pause_s)

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        try:
            async for line in lines_of(reader):
                self._on_reply(decode_reply(line))
        except (ValueError, OSError) as error:
            if not self._is_stopping:
                _log.warning("the ucx process sent an invalid reply (%s) and is ended", error)

    async def _gone(self) -> None:
        """Wait for the end of the process: then nothing of it is in flight."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if not self._is_stopping:
            self.kill()
        status = await self._child.wait() if self._child is not None else 0
        self._on_end()
        if not self._is_stopping:
            _log.warning("the ucx process ended with status %d and is started again", status)
            self._on_gone()
