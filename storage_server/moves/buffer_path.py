"""S3RDMA Buffer: an object staged whole in this process's memory between the store and the client's.

The gateway of `objectcache serve` runs in the storage server's process and stages here; a gateway elsewhere has no UCX
and declines. (ObjectCache paper, section 4.1.)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from descriptors.objects import BodyDigests
from descriptors.storage_api import Piece
from storage_server.delivery.gather.staging import Slot, StagingPool
from storage_server.delivery.transport.one_sided import OneSided
from storage_server.delivery.transport.ucx_memory import WHOLE_SLOT_BYTES
from storage_server.kernel.shared_room import SharedRoom
from storage_server.planning.put_plan import one_run


class BufferStaging:
    """Memory for whole objects: `pool` has slots of WHOLE_SLOT_BYTES; a pool of None stages nothing. An object waits
    until all of it fits, so that two half-staged objects cannot wait for each other. Others do not wait for a caller
    whose own share is in use: its clients may be silent, and keep what they have for as long as they may.
    """

    def __init__(self, pool: StagingPool | None) -> None:
        self._pool = pool
        total, share = (0, 0) if pool is None else (pool.slot_count, pool.key_slots_max)
        self._room = SharedRoom(total, share, "too many objects are staged whole on their way past HTTP")

    @property
    def nbytes(self) -> int:
        """The largest object that can be staged; 0 when none can."""
        return self._room.share * WHOLE_SLOT_BYTES

    @asynccontextmanager
    async def lent(self, access_key: str, nbytes: int) -> AsyncIterator[list[Slot]]:
        """Lend slots for `nbytes` bytes until the block ends. By then nothing may be in flight in them. Raises
        ServerError(SlowDown) where they do not become free.
        """
        count, slots = -(-nbytes // WHOLE_SLOT_BYTES), list[Slot]()
        async with self._room.holding(access_key) as held:
            await held.at_least(count)
            try:
                if self._pool is not None:
                    window = self._pool.window(access_key, self._pool.slot_count)
                    for _ in range(count):
                        slots.append(await window.take())  # at once: so many are free
                yield slots
            finally:
                for slot in slots:
                    slot.release()


class StagedBody:
    """Implements descriptors.storage_api.Body over staged bytes."""

    def __init__(self, slots: Sequence[Slot], nbytes: int, said: BodyDigests) -> None:
        self._slots = slots
        self._nbytes = nbytes
        self._said = said

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

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Yields copies, because other ucx peers may write into a slot between the digest and the disk."""
        for index, slot in enumerate(self._slots):
            yield bytes(slot.view[: _bytes_in(index, self._nbytes)])


async def stage_body(body: AsyncIterator[Piece], slots: Sequence[Slot]) -> int:
    """Copy a body into the slots and return its length in bytes."""
    at = 0
    async for piece in body:
        view = memoryview(piece)
        while view:
            index, within = divmod(at, WHOLE_SLOT_BYTES)
            count = min(len(view), WHOLE_SLOT_BYTES - within)
            slots[index].view[within : within + count] = view[:count]
            view, at = view[count:], at + count
    return at


def write_slots(one_sided: OneSided, slots: Sequence[Slot], nbytes: int) -> None:
    """Begin to write the slots' first `nbytes` bytes to the target. Raises ServerError(TargetUnreachable)."""
    for index, slot in enumerate(slots):
        one_sided.write(slot, _bytes_in(index, nbytes), index * WHOLE_SLOT_BYTES, _stay_staged)


async def read_into_slots(one_sided: OneSided, slots: Sequence[Slot], nbytes: int) -> None:
    """Read the target's first `nbytes` bytes into the slots. Raises ServerError(TargetUnreachable)."""
    for index, slot in enumerate(slots):
        reading = one_sided.read(slot, one_run(index * WHOLE_SLOT_BYTES, _bytes_in(index, nbytes)))
        reading.add_done_callback(_retrieve)
    await one_sided.finish()


def _stay_staged() -> None:
    """Do nothing: all slots of an object are given back together, when its block ends."""


def _bytes_in(index: int, nbytes: int) -> int:
    return min(WHOLE_SLOT_BYTES, nbytes - index * WHOLE_SLOT_BYTES)


def _retrieve(reading: asyncio.Future[None]) -> None:
    """If the read fails, the request fails with the same error; marking the error as seen keeps asyncio from logging
    it.
    """
    if not reading.cancelled():
        reading.exception()
