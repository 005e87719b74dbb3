"""The ucx transfer: one-sided writes into the client's registered buffer, a notice when a layer is complete.

A layer-ready notice is sent only after NIXL reports every payload of that layer done, so no notice can overtake its
bytes: the ucx process sees to that. `done` and `failed` are sent only when nothing is in flight: after either, the
buffer is the client's again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from adapters.nixl_agent import Memory, NixlFailure, PeerLost
from descriptors.descriptor import RdmaTarget
from descriptors.errors import ErrorCode, ServerError
from descriptors.messages import Region
from descriptors.notices import Done, Failed, LayerReady, Mode, Notice, encode_notice
from descriptors.storage_api import DeliveryStart, Spans
from storage_server.gather.plan import DeliveryPlan, Payload
from storage_server.gather.staging import Window
from storage_server.transport.transfer import Room, admitted
from storage_server.transport.ucx_commands import Group
from storage_server.transport.ucx_process import UcxProcess

DIRECT_WRITES_MAX = 4


class UcxTransfer:
    """Writes into `target` of a peer's `region`, from the window's slots, or with `from_resident` straight from where
    chunks lie in registered memory, DIRECT_WRITES_MAX at once. Lives on one event loop.
    """

    def __init__(
        self,
        engine: UcxProcess,
        peer: str,
        region: Region,
        target: RdmaTarget,
        plan: DeliveryPlan,
        window: Window,
        stall_timeout_s: float,
        on_peer_lost: Callable[[], None],
        *,
        from_resident: bool,
    ) -> None:
        self._engine = engine
        self._peer = peer
        self._region = region
        self._base_address = region.address + target.offset
        self._plan = plan
        self._window = window
        self._from_resident = from_resident
        self._permits = asyncio.Semaphore(DIRECT_WRITES_MAX)
        self._stall_timeout_s = stall_timeout_s
        self._on_peer_lost = on_peer_lost
        self._loop = asyncio.get_running_loop()
        self._request_id = ""
        self._in_flight = 0
        self._flight = engine.begin_flight()
        self._transferred_bytes = 0
        self._failure: ServerError | None = None
        self._changed = asyncio.Event()
        self._posted = 0
        self._watch: asyncio.Task[None] | None = None

    async def start(self, start: DeliveryStart) -> None:
        self._request_id = start.request_id
        self._watch = asyncio.create_task(self._watch_for_stall())
        self._notify(admitted(start))

    async def room(self, payload: Payload, *, is_resident: bool) -> Room | None:
        if is_resident and self._from_resident:
            return None
        return await self._window.take()

    async def send(self, payload: Payload, spans: Spans, room: Room | None) -> None:
        if self._failure is not None:
            if room is not None:
                room.release()
            raise self._failure
        target = Memory(self._base_address + payload.target_offset, payload.nbytes, self._region.device)
        if room is None:
            await self._permits.acquire()
        self._in_flight += 1
        self._posted += 1
        group = Group(self._flight, payload.group_index, payload.ends_group, self._ready_notice(payload))

        def on_written(counted: int, failure: NixlFailure | None) -> None:
            self._written(room, counted, failure)

        self._engine.write(self._peer, spans, target, group, on_written)

    def _written(self, room: Room | None, counted: int, failure: NixlFailure | None) -> None:
        if room is not None:
            room.release()
        else:
            self._permits.release()
        self._in_flight -= 1
        self._transferred_bytes += counted
        self._changed.set()
        if failure is not None:
            self._fail_with(failure)

    def _ready_notice(self, payload: Payload) -> bytes:
        """What the client is sent when the payload's layer is complete; nothing in chunk-major mode."""
        if self._plan.mode is not Mode.LAYER_MAJOR:
            return b""
        layer, nbytes = payload.group_index, self._plan.group_bytes
        return encode_notice(LayerReady(self._request_id, layer, layer * nbytes, nbytes))

    async def finish(self) -> int:
        await self._drain()
        if self._failure is not None:
            raise self._failure
        self._notify(Done(self._request_id, self._transferred_bytes))
        return self._transferred_bytes

    async def fail(self, layer_index: int, chunk_index: int) -> None:
        await self._drain()
        if self._failure is None:
            self._notify(Failed(self._request_id, layer_index, chunk_index))

    async def close(self) -> None:
        try:
            await self._drain()
        finally:
            self._engine.end_flight(self._flight)
            if self._watch is not None:
                self._watch.cancel()

    async def _drain(self) -> None:
        while self._in_flight:
            self._changed.clear()
            await self._changed.wait()

    async def _watch_for_stall(self) -> None:
        """A peer that takes nothing for `stall_timeout_s` is disconnected, which ends its writes in flight."""
        changed_at_s, seen, is_disconnected = self._loop.time(), (0, 0), False
        while True:
            await asyncio.sleep(self._stall_timeout_s / 8)
            now_s, state = self._loop.time(), (self._posted, self._in_flight)
            if state != seen or not self._in_flight:
                changed_at_s, seen = now_s, state
            elif now_s - changed_at_s >= self._stall_timeout_s and not is_disconnected:
                is_disconnected = True
                self._fail_with(PeerLost(f"no write completed for {self._stall_timeout_s} s"))
                self._engine.disconnect(self._peer)

    def _fail_with(self, failure: NixlFailure) -> None:
        if self._failure is None:
            if isinstance(failure, PeerLost):
                self._on_peer_lost()
            self._failure = ServerError(
                ErrorCode.TARGET_UNREACHABLE, f"writing into the client's buffer failed: {failure}", field="rdma_target"
            )

    def _notify(self, notice: Notice) -> None:
        self._engine.notify(self._peer, encode_notice(notice))
