"""Chunks whose bytes are still on their way when the delivery begins, such as those that another store sends. They come
into landing memory, or straight into a file. A payload is gathered when its bytes have come.

    of A and B layers 0 and 1 have come, of C layer 0:  the payload of layer 0 goes, that of layer 1 waits for C
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from descriptors.errors import ChunkUnavailable, ErrorCode, ObjectCacheError
from storage_server.delivery.gather.landing import Landed
from storage_server.delivery.gather.passing import PassingExtent
from storage_server.planning.block_checksums import BLOCK_BYTES, WORD_BYTES
from storage_server.planning.extent import Extent
from storage_server.planning.plan import Payload
from storage_server.planning.rows import SourceTable

OnArrival = Callable[[int, int], None]
"""Called with the bytes that had come before, and those that have come now."""


class Arrival:
    """A chunk of `nbytes` on its way, into `landed` where that is given. Its bytes come from the first to the last, and
    can be read as far as they have come. Used on one event loop.
    """

    def __init__(self, nbytes: int, landed: Landed | None = None) -> None:
        self.nbytes = nbytes
        self.landed = landed
        self.arrived_bytes = 0
        self.words = bytearray(-(-nbytes // BLOCK_BYTES) * WORD_BYTES)
        """The checksums of the blocks that have come; zeros for the others."""
        self.failure: ObjectCacheError | None = None
        self._listeners: list[OnArrival] = []

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come."""
        return self.arrived_bytes == self.nbytes

    @property
    def address(self) -> int | None:
        """Where it lies in memory; None where it must be read from its file."""
        return self.landed.address if self.landed is not None and self.landed.is_held else None

    def advance(self, arrived_bytes: int, words: bytes) -> None:
        """Note that the chunk has come up to `arrived_bytes`; `words` are the checksums of all blocks so far."""
        before, self.arrived_bytes = self.arrived_bytes, arrived_bytes
        self.words[: len(words)] = words
        self._tell(before)

    def fail(self, error: ObjectCacheError) -> None:
        """Note that the rest will not come."""
        self.failure = error
        self._tell(self.arrived_bytes)

    def listen(self, listener: OnArrival) -> Callable[[], None]:
        """Hear of each change; call what is returned to hear no more."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _tell(self, before: int) -> None:
        for listener in list(self._listeners):
            listener(before, self.arrived_bytes)


@dataclass(frozen=True, slots=True)
class ComingExtent(Extent):
    """A whole chunk that is on its way. Its checksums are zeros."""

    arrival: Arrival = field(default_factory=lambda: Arrival(0), compare=False, repr=False)

    @staticmethod
    def of(file_id: str, offset: int, arrival: Arrival) -> ComingExtent:
        """The extent at this location in a file."""
        return ComingExtent(file_id, offset, arrival.nbytes, bytes(len(arrival.words)), arrival=arrival)


def is_whole(extent: Extent) -> bool:
    """Whether all of it can be read: it has come, and was not stopped on the way from memory into its file. That is
    never so of a chunk that passes.
    """
    if isinstance(extent, PassingExtent):
        return False
    return not isinstance(extent, ComingExtent) or (extent.arrival.is_whole and extent.arrival.failure is None)


def hold_landed(extents: Iterable[Extent]) -> list[Landed]:
    """Hold the memory that these extents lie in, or come into. Release what is returned."""
    held: list[Landed] = []
    for extent in extents:
        landed = extent.arrival.landed if isinstance(extent, ComingExtent) else None
        if landed is not None and landed.is_held:
            landed.hold()
            held.append(landed)
    return held


def with_landed(extents: Iterable[Extent], addresses: Sequence[int | None]) -> list[int | None]:
    """The addresses of extents in memory, with those of landing memory that is held."""
    return [
        extent.arrival.address if address is None and isinstance(extent, ComingExtent) else address
        for extent, address in zip(extents, addresses, strict=True)
    ]


class Coming:
    """The chunks of one delivery that are on their way. `table` is the delivery's table, whose checksums are filled in
    as the chunks come. Use it as a context.
    """

    def __init__(self, table: SourceTable, arrivals: Sequence[Arrival | None]) -> None:
        self._words = bytearray(table.words)
        self.table = replace(table, words=self._words)
        self._arrivals = arrivals
        far = np.iinfo(np.int64).max
        self._arrived = np.full(len(arrivals), far, dtype=np.int64)
        """How much of each chunk has come, by its index; without end for a chunk that lies there."""
        self._changed = asyncio.Event()
        self._failed: set[int] = set()
        self._stop_listening: list[Callable[[], None]] = []

    @staticmethod
    def among(table: SourceTable, chunks: Sequence[Sequence[Extent]]) -> Coming | None:
        """The coming chunks of a delivery; None where all of them lie there."""
        arrivals = [chunk[0].arrival if isinstance(chunk[0], ComingExtent) else None for chunk in chunks]
        return Coming(table, arrivals) if any(arrival is not None for arrival in arrivals) else None

    def __enter__(self) -> Coming:
        for index, arrival in enumerate(self._arrivals):
            if arrival is not None:
                listener = self._listener(index, arrival)
                self._stop_listening.append(arrival.listen(listener))
                listener(0, arrival.arrived_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        for stop in self._stop_listening:
            stop()

    async def wait_for(self, payload: Payload) -> None:
        """Return when every byte of the payload, and of the blocks that it lies in, can be read. Raises
        ChunkUnavailable with the chunk's index where a chunk will not come.
        """
        chunks = slice(payload.first_chunk, payload.first_chunk + payload.chunk_count)
        end = int(np.max(np.asarray(payload.source_offset) + np.asarray(payload.piece_bytes)))
        while True:
            self._changed.clear()
            for index in sorted(index for index in self._failed if chunks.start <= index < chunks.stop):
                failed = self._arrivals[index]
                assert failed is not None
                assert failed.failure is not None
                if self._arrived[index] < end or failed.address is None:  # what came before has left the memory, too
                    raise _will_not_come(index, payload, failed.failure)
            if not (self._arrived[chunks] < end).any():
                return
            await self._changed.wait()

    def _listener(self, index: int, arrival: Arrival) -> OnArrival:
        first_word = self.table.first_word_of(index) * WORD_BYTES

        def on_arrival(before: int, now: int) -> None:
            start, end = before // BLOCK_BYTES * WORD_BYTES, -(-now // BLOCK_BYTES) * WORD_BYTES
            self._words[first_word + start : first_word + end] = arrival.words[start:end]
            if arrival.failure is not None:
                self._failed.add(index)
            is_whole = now == arrival.nbytes
            self._arrived[index] = now if is_whole else now // BLOCK_BYTES * BLOCK_BYTES
            self._changed.set()

        return on_arrival


def _will_not_come(index: int, payload: Payload, failure: ObjectCacheError) -> ChunkUnavailable:
    name = f"chunk_keys[{index}]"
    problem = f"{name} could not be read to its end: {failure.message}"
    return ChunkUnavailable(ErrorCode.NO_SUCH_CHUNK, problem, field=name, index=index, layer=payload.group.index)
