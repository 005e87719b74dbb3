"""An object's bytes, read one-sided from a client's registered memory and handed to the store as any other body.

Several slots are read ahead, as many as the window allows. Bytes that have arrived are copied before the store gets
them, because other ucx peers may write into a slot between the digest and the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from descriptors.errors import ObjectCacheError
from descriptors.objects import BodyDigests
from descriptors.storage_api import Piece
from objectcache.adapters.threads import finished, to_end
from storage_server.delivery.gather.staging import Slot, SlotWindow
from storage_server.delivery.transport.one_sided import OneSided
from storage_server.planning.put_plan import SpansOf


class RegionBody:
    """Implements descriptors.storage_api.Body over `nbytes` bytes. Use it as a context: the end of the context waits
    for reads in flight and gives every slot back.
    """

    def __init__(
        self,
        one_sided: OneSided,
        window: SlotWindow,
        slot_bytes: int,
        nbytes: int,
        spans_of: SpansOf,
        said: BodyDigests = BodyDigests(),  # noqa: B008 - frozen
    ) -> None:
        self._one_sided = one_sided
        self._window = window
        self._slot_bytes = slot_bytes
        self._nbytes = nbytes
        self._spans_of = spans_of
        self._said = said
        self._arriving: asyncio.Queue[tuple[Slot, int] | None] = asyncio.Queue()
        self._failure: ObjectCacheError | None = None
        self._held: dict[Slot, asyncio.Future[None]] = {}
        self._filling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RegionBody:
        return self

    async def __aexit__(self, *_: object) -> None:
        await to_end(asyncio.ensure_future(self._close()))

    @property
    def has_sha256(self) -> bool:
        """Whether a SHA-256 of the object is known."""
        return self._said.sha256 is not None

    @property
    def is_held_back(self) -> bool:
        """False: the server reads the bytes itself, so no client waits for leave to send."""
        return False

    def digests(self) -> BodyDigests:
        """The digests that the caller states for the object."""
        return self._said

    def fail(self, error: ObjectCacheError) -> None:
        """End the body early: the next step of an iteration over it raises this error. An iteration that has ended is
        not touched.
        """
        self._failure = error
        if self._filling is not None:
            self._filling.cancel()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Raises ServerError(TargetUnreachable) when the client's memory cannot be read, and what `fail` was given."""
        self._require_wanted()
        self._filling = asyncio.create_task(self._read_ahead())
        while (item := await self._arriving.get()) is not None:
            slot, nbytes = item
            await asyncio.shield(self._held[slot])
            self._require_wanted()
            piece = bytes(slot.view[:nbytes])
            self._give_back(slot)
            yield piece
        self._require_wanted()
        await self._filling

    def _require_wanted(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _read_ahead(self) -> None:
        try:
            for start in range(0, self._nbytes, self._slot_bytes):
                nbytes = min(self._slot_bytes, self._nbytes - start)
                slot = await self._window.take()
                try:
                    self._held[slot] = self._one_sided.read(slot, self._spans_of(start, nbytes))
                except BaseException:
                    slot.release()
                    raise
                self._arriving.put_nowait((slot, nbytes))
        finally:
            self._arriving.put_nowait(None)

    def _give_back(self, slot: Slot) -> None:
        del self._held[slot]
        slot.release()

    async def _close(self) -> None:
        if self._filling is not None:
            self._filling.cancel()
            await finished(self._filling)
        for slot, reading in list(self._held.items()):
            await finished(reading)
            self._give_back(slot)
