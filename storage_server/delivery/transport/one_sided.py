"""One-sided writes and reads between staging slots and one place in a region of a client's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from descriptors.errors import ServerError
from descriptors.messages import Region
from objectcache.adapters.nixl_agent import NixlFailure
from objectcache.adapters.nixl_memory import Memory
from objectcache.adapters.threads import to_end
from storage_server.delivery.gather.staging import Slot
from storage_server.delivery.transport.flight import Flight
from storage_server.delivery.transport.ucx_process import UcxProcess
from storage_server.planning.put_plan import Span


class OneSided:
    """Transfers between slots and the peer's `region`; offsets count from `offset` of the region. Use it as a context:
    the end of the context waits until nothing is in flight. Used on one event loop.
    """

    def __init__(self, engine: UcxProcess, peer: str, region: Region, offset: int, flight: Flight) -> None:
        self._engine = engine
        self._peer = peer
        self._address = region.address + offset
        self._device = region.device
        self._flight = flight
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> OneSided:
        return self

    async def __aexit__(self, *_: object) -> None:
        await to_end(asyncio.ensure_future(self._flight.close()))

    @property
    def busy_s(self) -> float:
        """The seconds during which anything was in flight."""
        return self._flight.busy_s

    def require_reachable(self) -> None:
        """Raises ServerError(TargetUnreachable) once the client is gone."""
        self._flight.require_reachable()

    def write(self, slot: Slot, nbytes: int, offset: int, then: Callable[[], None]) -> None:
        """Write the slot's first `nbytes` bytes to `offset`. `then` is called when the slot may be used again. Raises
        ServerError(TargetUnreachable) once the client is gone.
        """
        self._flight.require_reachable()
        spans = np.array([[slot.address, nbytes]], dtype=np.int64)
        target = Memory(self._address + offset, nbytes, self._device)
        self._flight.began()
        self._engine.write(self._peer, spans, [target], None, self._make_on_ended(nbytes, lambda _: then()))

    def read(self, slot: Slot, spans: Sequence[Span]) -> asyncio.Future[None]:
        """Read the spans, one after the other, into the slot. The slot is in use until the future is done. Raises what
        `write` raises, here or in the future.
        """
        self._flight.require_reachable()
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

        self._flight.began()
        self._engine.read(self._peer, sources, slot.address, self._make_on_ended(nbytes, settle))
        return done

    async def finish(self) -> int:
        """Wait for every transfer; returns the bytes that NIXL counted. Raises ServerError(TargetUnreachable)."""
        return await self._flight.finish()

    def _make_on_ended(
        self, nbytes: int, then: Callable[[ServerError | None], None]
    ) -> Callable[[int, NixlFailure | None], None]:
        """The callback for the engine at the end of a transfer of `nbytes` bytes."""

        def on_ended(counted: int, failure: NixlFailure | None) -> None:
            if failure is None and counted != nbytes:
                failure = NixlFailure(f"{counted} of {nbytes} bytes were moved")
            self._flight.ended(counted, failure)
            then(self._flight.failure if failure is not None else None)

        return on_ended
