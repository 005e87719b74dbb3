"""Flight: the one-sided writes and reads of one request that have not ended.

However the request ends, `close` returns only when nothing is in flight. Then the server may use its own memory again,
and the client its own. A peer that completes nothing for a while is disconnected, which ends its transfers with an
error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from descriptors.errors import ErrorCode, ServerError
from objectcache.adapters.nixl_agent import NixlFailure, PeerLost
from storage_server.delivery.transport.ucx_process import UcxProcess


class Flight:
    """Transfers between this server and `peer`. `on_peer_lost` is called once, when the peer cannot be reached any
    more. Used on one event loop.
    """

    def __init__(self, engine: UcxProcess, peer: str, stall_timeout_s: float, on_peer_lost: Callable[[], None]) -> None:
        self._engine = engine
        self._peer = peer
        self._stall_timeout_s = stall_timeout_s
        self._on_peer_lost = on_peer_lost
        self._loop = asyncio.get_running_loop()
        self._in_flight = 0
        self._ended_count = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy_since_s = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self.moved_bytes = 0
        """The bytes that NIXL counted."""
        self.busy_s = 0.0
        """The seconds during which anything was in flight."""
        self.failure: ServerError | None = None
        """The reason why the client's memory cannot be reached; None while it can."""

    def require_reachable(self) -> None:
        """Raises ServerError(TargetUnreachable) once a transfer has failed."""
        if self.failure is not None:
            raise self.failure

    def began(self) -> None:
        """Note that one more transfer is in flight."""
        if not self._in_flight:
            self._busy_since_s = time.perf_counter()
        self._in_flight += 1
        self._idle.clear()
        if self._watch is None:
            self._watch_from(self._ended_count)

    def ended(self, counted_bytes: int, failure: NixlFailure | None) -> None:
        """Note that one transfer has ended, with the bytes NIXL counted or with a failure."""
        self._in_flight -= 1
        self._ended_count += 1
        self.moved_bytes += counted_bytes
        if failure is not None:
            self._fail_with(failure)
        if not self._in_flight:
            self.busy_s += time.perf_counter() - self._busy_since_s
            self._idle.set()

    async def landed(self) -> None:
        """Return when nothing is in flight."""
        await self._idle.wait()

    async def finish(self) -> int:
        """Wait until nothing is in flight; returns the bytes that NIXL counted. Raises
        ServerError(TargetUnreachable).
        """
        await self._idle.wait()
        self.require_reachable()
        return self.moved_bytes

    async def close(self) -> None:
        """Return when nothing is in flight, and stop watching for a stall."""
        try:
            await self._idle.wait()
        finally:
            if self._watch is not None:
                self._watch.cancel()

    def _watch_from(self, ended_count: int) -> None:
        self._watch = self._loop.call_later(self._stall_timeout_s, partial(self._check_for_stall, ended_count))

    def _check_for_stall(self, ended_count: int) -> None:
        self._watch = None
        if not self._in_flight:
            return
        if ended_count == self._ended_count and self.failure is None:
            self._fail_with(PeerLost(f"nothing moved for {self._stall_timeout_s} s"))
            self._engine.disconnect(self._peer)
        self._watch_from(self._ended_count)

    def _fail_with(self, failure: NixlFailure) -> None:
        if self.failure is None:
            if isinstance(failure, PeerLost):
                self._on_peer_lost()
            self.failure = ServerError(
                ErrorCode.TARGET_UNREACHABLE, f"the client's memory cannot be reached: {failure}", field="rdma_target"
            )
