"""The store of remote DRAM. It is joined again when its client has ended, and left alone for a while where it fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Coroutine, Sequence
from typing import Any, TypeVar

from objectcache.adapters.breaker import Breaker
from objectcache.adapters.memory_area import SharedArea
from storage_server.delivery.gather.landing import Landed
from storage_server.home.remote_dram import mooncake_process
from storage_server.home.remote_dram.mooncake_process import MooncakeClient
from storage_server.home.rules.unended_moves import NOT_FOUND, NOT_READY
from storage_server.settings import RemoteDramSettings

CLOSE_WAIT_S = 10.0
PAUSE_S_MIN, PAUSE_S_MAX = 2.0, 60.0
"""After a failure the store is left alone for so long."""
_T = TypeVar("_T")
_log = logging.getLogger(__name__)

Connect = Callable[[RemoteDramSettings, Sequence[SharedArea]], Awaitable[MooncakeClient]]


class JoinedStore:
    """One store, whose client gets `areas`. Used on one event loop."""

    def __init__(
        self, settings: RemoteDramSettings, areas: Callable[[], Sequence[SharedArea]], connect: Connect | None
    ) -> None:
        self._settings = settings
        self._areas = areas
        self._connect = connect
        self.client: MooncakeClient | None = None
        self._joining: asyncio.Task[None] | None = None
        self._breaker = Breaker(1, PAUSE_S_MIN, PAUSE_S_MAX)
        self._is_closing = False
        self.calls: set[asyncio.Task[Any]] = set()
        """The calls under way."""
        self._kept: list[tuple[MooncakeClient, Landed]] = []
        """Memory that bytes may still come into, until the client has left that was given it."""
        self.failed_count = 0

    def start(self) -> None:
        """Begin to join. Raises RemoteDramError where the client is not installed."""
        if self._connect is None:
            mooncake_process.require_client()
        self._join_again()

    async def close(self) -> None:
        """Leave the store. A call that hangs ends with the Mooncake process."""
        self._is_closing = True
        if self._joining is not None:
            self._joining.cancel()
        if self.calls:
            await asyncio.wait(self.calls, timeout=CLOSE_WAIT_S)
        if self.client is not None:
            await self.client.close()
        if self.calls:
            await asyncio.wait(self.calls)
        self._free({client for client, _ in self._kept})

    @property
    def is_usable(self) -> bool:
        """Whether the store is there, and did not fail a moment ago."""
        if not self.is_joined:
            self._join_again()
        return self.is_joined and not self._is_closing and not self._breaker.is_open(time.monotonic())

    @property
    def is_joined(self) -> bool:
        """Whether the store was joined, and the process that did lives."""
        return self.client is not None and self.client.is_running

    def call(self, call: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Begin a call, which `close` waits for."""
        task = asyncio.create_task(call)
        self.calls.add(task)
        task.add_done_callback(self.calls.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def result(self, call: asyncio.Task[_T]) -> _T | None:
        """The result of a call; None where it raised."""
        error = call.exception()
        if error is not None:
            self.failed(f"Mooncake's client: {error!r}")
            return None
        return call.result()

    def note(self, code: int) -> None:
        """An answer. One that comes during a pause was waited for too long, and says nothing good of the store."""
        if code < 0 and code not in (NOT_FOUND, NOT_READY):
            self.failed(f"Mooncake answered {code}")
        elif not self._breaker.is_open(time.monotonic()):
            self._breaker.succeeded()

    def failed(self, problem: str) -> None:
        """Leave the store alone for a while."""
        self.failed_count += 1
        was_good = not self._breaker.failure_count
        self._breaker.failed(time.monotonic())
        if was_good:
            _log.warning("remote DRAM: %s; home is asked instead", problem)

    def keep_until_left(self, client: MooncakeClient, landed: Landed) -> None:
        """Give this memory to nobody else before the client has left."""
        landed.hold()
        self._kept.append((client, landed))

    @property
    def kept_bytes(self) -> int:
        """The memory that waits for a client to leave."""
        return sum(len(landed.view) for _, landed in self._kept)

    def leave(self) -> None:
        """End the client; the next use joins again."""
        if self.client is not None and self.client.is_running:
            self.call(self.client.close())

    def _free(self, left: Container[MooncakeClient]) -> None:
        """Give back the memory of clients that have left."""
        kept, self._kept = self._kept, []
        for client, landed in kept:
            if client in left:
                landed.release()
            else:
                self._kept.append((client, landed))

    def _join_again(self) -> None:
        """Begin to join the store, unless that failed a moment ago."""
        is_joining = self._joining is not None and not self._joining.done()
        if not is_joining and not self._is_closing and not self._breaker.is_open(time.monotonic()):
            self._joining = self.call(self._join())

    async def _join(self) -> None:
        connect = self._connect or mooncake_process.joined
        try:
            before, self.client = self.client, None
            if before is not None:
                await before.close()
                self._free([before])
            self.client = await connect(self._settings, self._areas())
        except Exception as error:  # whatever it is, home is there
            self.failed(str(error))
            return
        self._breaker.succeeded()
