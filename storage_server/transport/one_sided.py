"""The one-sided writes and reads of one request in one region of a client's memory.

However the request ends, `close` returns only when nothing of it is in flight: our memory and the client's are then
their owners' again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from adapters.nixl_agent import Memory, NixlFailure, PeerLost
from adapters.threads import to_end
from descriptors.errors import ErrorCode, ServerError
from descriptors.messages import Region
from storage_server.gather.staging import Slot
from storage_server.put_plan import Span
from storage_server.transport.ucx_process import UcxProcess


class OneSided:
    """Offsets count from `offset` of the peer's `region`. Use as a context; lives on one event loop."""

    def __init__(
        self,
        engine: UcxProcess,
        peer: str,
        region: Region,
        offset: int,
        stall_timeout_s: float,
        on_peer_lost: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._peer = peer
        self._address = region.address + offset
        self._device = region.device
        self._stall_timeout_s = stall_timeout_s
        self._on_peer_lost = on_peer_lost
        self._loop = asyncio.get_running_loop()
        self._in_flight = 0
        self._ended_count = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._moved_bytes = 0
        self._busy_since_s = 0.0
        self.busy_s = 0.0
        """How long anything was in flight."""
        self._watch: asyncio.TimerHandle | None = None
        self.failure: ServerError | None = None

    async def __aenter__(self) -> OneSided:
        return self

    async def __aexit__(self, *_: object) -> None:
        await to_end(asyncio.ensure_future(self.close()))

    def write(self, slot: Slot, nbytes: int, offset: int, then: Callable[[], None]) -> None:
        """Write the slot's first bytes to `offset`; `then` is called when its memory is no longer in use. Raises
        ServerError(TargetUnreachable) once the client is gone.
        """
        if self.failure is not None:
            raise self.failure
        spans = np.array([[slot.address, nbytes]], dtype=np.int64)
        target = Memory(self._address + offset, nbytes, self._device)
        self._posted()
        self._engine.write(self._peer, spans, target, None, self._hears(nbytes, lambda _: then()))

    def read(self, slot: Slot, spans: Sequence[Span]) -> asyncio.Future[None]:
        """Read the spans, one after the other, into the slot, whose memory is in use until the future is done. Errors
        as in `write`, here or in the future.
        """
        if self.failure is not None:
            raise self.failure
        sources = [Memory(self._address + span.offset, span.nbytes, self._device) for span in spans]
        nbytes = sum(span.nbytes for span in spans)
        done: asyncio.Future[None] = self._loop.create_future()

        def settle(failure: ServerError | None) -> None:
            if done.cancelled():
                return
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)

        self._posted()
        self._engine.read(self._peer, sources, slot.address, self._hears(nbytes, settle))
        return done

    async def finish(self) -> int:
        """Wait for everything posted; how many bytes NIXL counted. Raises ServerError(TargetUnreachable)."""
        await self._idle.wait()
        if self.failure is not None:
            raise self.failure
        return self._moved_bytes

    async def close(self) -> None:
        """Return when nothing is in flight."""
        try:
            await self._idle.wait()
        finally:
            if self._watch is not None:
                self._watch.cancel()

    def _posted(self) -> None:
        if not self._in_flight:
            self._busy_since_s = time.perf_counter()
        self._in_flight += 1
        self._idle.clear()
        if self._watch is None:
            self._watch_from(self._ended_count)

    def _hears(
        self, nbytes: int, then: Callable[[ServerError | None], None]
    ) -> Callable[[int, NixlFailure | None], None]:
        """What the engine calls when a transfer has ended."""

        def on_ended(counted: int, failure: NixlFailure | None) -> None:
            if failure is None and counted != nbytes:
                failure = NixlFailure(f"{counted} of {nbytes} bytes were moved")
            self._ended(counted, failure, then)

        return on_ended

    def _ended(self, counted: int, failure: NixlFailure | None, then: Callable[[ServerError | None], None]) -> None:
        self._in_flight -= 1
        self._ended_count += 1
        self._moved_bytes += counted
        if failure is not None:
            self._fail_with(failure)
        then(self.failure if failure is not None else None)
        if not self._in_flight:
            self.busy_s += time.perf_counter() - self._busy_since_s
            self._idle.set()

    def _watch_from(self, ended_count: int) -> None:
        """A peer that moves nothing for `stall_timeout_s` is disconnected, which ends its transfers in flight."""
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
