"""Merging the bodies of a delivery's portions into one body, in bounded memory.

A portion's body has its own slices only, group after group (a group is a layer, or all chunks in chunk-major mode),
each in the order of the prefix. So the next bytes of the whole are always the next bytes of one of the portions. They
are taken window by window: as many neighbouring slices as fit in `window_bytes`, each portion's at once.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from descriptors.placement import Indices
from descriptors.storage_api import DeliveryStart, Patience, Spans
from descriptors.units import MIB
from gateway.cluster.members import STALL_S
from gateway.storage_client import StorageUnreachableError
from objectcache.adapters import native
from objectcache.adapters.reading_pace import ReadingPace

WINDOW_BYTES = 4 * MIB
PATIENCE = Patience(window_s=60.0, least_bytes_per_s=1024.0)
"""A portion that has begun and is waited for comes no slower, or others are asked for it. Links may make it slow, too,
so this is far below what a link gives.
"""
Bytes = npt.NDArray[np.uint8]


class Overtaken(Exception):
    """Others have brought what the reader of a portion waits for."""


class PortionPlaces(Protocol):
    """Where the bytes of a portion go, in order."""

    left_bytes: int

    def put(self, view: memoryview) -> int:
        """Take bytes, as many as there is room for, and say how many."""


class PortionBody:
    """The body of one portion, as a BodySink for the storage side and as a reader for the merge. The storage side puts
    bytes into their places as they come, and waits where nobody wants any, so that nothing of a portion is kept here
    but the bytes that its connection has just brought. When nothing has come for `stall_s`, `require_alive` is called,
    which raises where the portion's server is gone. A server that is there and hardly brings anything counts as gone.
    """

    def __init__(self, require_alive: Callable[[], Awaitable[None]], stall_s: float = STALL_S) -> None:
        self._require_alive = require_alive
        self._stall_s = stall_s
        self._pace = ReadingPace(PATIENCE)
        self._start: DeliveryStart | None = None
        self._places: PortionPlaces | None = None
        self._skipped_bytes = 0
        self._is_filled = False
        self._came = asyncio.Event()
        self._wanted = asyncio.Event()
        self._failure: Exception | None = None
        self.read_bytes = 0
        """How many bytes have been taken."""
        self.window: Window | None = None
        """The window whose bytes were wanted last."""

    async def begin(self, start: DeliveryStart) -> None:
        """Note that the portion begins."""
        self._start = start
        self._came.set()

    async def write(self, view: memoryview) -> None:
        """Put bytes into their places, and wait until all are taken. Raises ConnectionResetError where nobody will."""
        view = view.cast("B")
        while view:
            if self._failure is not None:
                raise ConnectionResetError("nobody reads this portion any more")
            if self._places is None:
                self._wanted.clear()
                await self._wanted.wait()
                continue
            taken_bytes = min(len(view), self._skipped_bytes)
            if taken_bytes:
                self._skipped_bytes -= taken_bytes
            else:
                taken_bytes = self._places.put(view)
                if not self._places.left_bytes:
                    self._places, self._is_filled = None, True
                    self._came.set()
            self.read_bytes += taken_bytes
            view = view[taken_bytes:]

    async def send(self, spans: Spans, patience: Patience) -> None:
        """Put memory of this process, as a storage side in it does."""
        for address, nbytes in spans:
            await self.write(memoryview((ctypes.c_char * int(nbytes)).from_address(int(address))))

    def abort(self) -> None:
        """Note that the body was cut short; `fail` says why."""

    def fail(self, error: Exception) -> None:
        """End the body with an error, which the reader gets. No further byte is put anywhere."""
        self._failure = self._failure or error
        self._places = None
        self._came.set()
        self._wanted.set()

    def overtake(self) -> None:
        """End the body because others have brought its bytes: the reader gets Overtaken."""
        self.fail(Overtaken())

    async def started(self) -> DeliveryStart:
        """The facts that the portion begins with. Raises what the portion failed with."""
        while self._start is None:
            await self._wait()
        return self._start

    def want(self, window: Window, at: int, places: PortionPlaces) -> None:
        """Have the bytes from byte `at` of the body on put into places; those before are passed over. Bytes that come
        before `filled` is awaited are put, too.
        """
        self.window, self._is_filled = window, False
        self._skipped_bytes = at - self.read_bytes
        if self._failure is None:
            self._places = places
            self._wanted.set()

    async def filled(self) -> None:
        """Wait until all places are filled. Raises what the portion failed with."""
        while not self._is_filled:
            await self._wait()

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        before_bytes = self.read_bytes
        try:
            async with asyncio.timeout(self._stall_s):
                await self._came.wait()
        except TimeoutError:
            if self.read_bytes == before_bytes:
                await self._require_alive()
            if self._start is not None and self._pace.is_too_slow(self._stall_s, self.read_bytes - before_bytes):
                raise StorageUnreachableError(TimeoutError("a portion comes too slowly")) from None
            return
        self._came.clear()


@dataclass(frozen=True, slots=True)
class Window:
    """Neighbouring slices of one group, from `first` to before `end`; or `nbytes` of one slice from its byte `start`,
    where a slice is larger than a window.
    """

    group: int
    first: int
    end: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """The slices of one group, one for each chunk of a delivery: their bytes, int64 of shape (k,), and where each
    begins, and the last one ends, int64 of shape (k + 1,).
    """

    sizes: Indices
    starts: Indices

    @classmethod
    def of(cls, sizes: Indices) -> Slices:
        """Slices of these sizes."""
        return cls(sizes, np.concatenate(([0], np.cumsum(sizes))))

    @classmethod
    def equal(cls, count: int, nbytes: int) -> Slices:
        """Slices of one size."""
        return cls.of(np.full(count, nbytes, dtype=np.int64))


def windows(group_count: int, slices: Slices, window_bytes: int) -> Iterator[Window]:
    """The windows of a delivery, in order: of each group as many neighbouring slices as fit, or a part of one that is
    larger.
    """
    count, starts = len(slices.sizes), slices.starts
    of_group: list[tuple[int, int]] = []
    first = 0
    while first < count:
        end = max(first + 1, int(np.searchsorted(starts, starts[first] + window_bytes, side="right")) - 1)
        of_group.append((first, end))
        first = end
    for group in range(group_count):
        for first, end in of_group:
            nbytes = int(starts[end] - starts[first])
            for start in range(0, nbytes, window_bytes):
                yield Window(group, first, end, start, min(window_bytes, nbytes - start))


class Share:
    """A portion's slices in a delivery, of chunks at `positions`, ascending."""

    def __init__(self, positions: Indices, slices: Slices) -> None:
        self._positions = positions
        self._slices = slices
        self._starts = np.concatenate(([0], np.cumsum(slices.sizes[positions])))
        """Where each slice begins among those of the portion in a group, and the last one ends."""
        self._spans: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        """The spans of the windows of a group: those of the next group are the same."""

    def bytes_before(self, window: Window, first_group: int) -> int:
        """How many bytes of the portion, whose body begins with `first_group`, lie before a window."""
        low, high = self._inside(window)
        start = window.start if low < high else 0
        return (window.group - first_group) * int(self._starts[-1]) + int(self._starts[low]) + start

    def nbytes(self, window: Window) -> int:
        """How many bytes of a window are the portion's."""
        low, high = self._inside(window)
        return min(window.nbytes, int(self._starts[high] - self._starts[low]))

    def spans(self, window: Window) -> npt.NDArray[np.int64]:
        """Where the slices lie in a window, neighbouring ones together: rows of (offset, nbytes)."""
        low, high = self._inside(window)
        if low == high or high - low == window.end - window.first:  # all of it, which may be a part of one slice
            return np.array([[0, window.nbytes]] if low < high else np.empty((0, 2)), dtype=np.int64)
        known = self._spans.get((window.first, window.end))
        if known is None:
            mine, starts = self._positions[low:high], self._slices.starts
            firsts = np.flatnonzero(np.diff(mine, prepend=-2) != 1)
            ends = self._starts[low + np.append(firsts[1:], high - low)]
            offsets = starts[mine[firsts]] - starts[window.first]
            known = np.stack((offsets, ends - self._starts[low + firsts]), axis=1)
            self._spans[window.first, window.end] = known
        return known

    def _inside(self, window: Window) -> tuple[int, int]:
        """Which of the slices lie in a window: from, and to before."""
        low, high = np.searchsorted(self._positions, (window.first, window.end)).tolist()
        return low, high


class _Spans:
    """Places in a window: int64 rows of (offset, nbytes)."""

    def __init__(self, target: Bytes, spans: npt.NDArray[np.int64]) -> None:
        self._target = target
        self._spans = spans
        self._put_bytes = 0
        self.left_bytes = int(spans[:, 1].sum())

    def put(self, view: memoryview) -> int:
        """As Places."""
        taken_bytes = min(len(view), self.left_bytes)
        native.scatter(self._target.data, self._spans, self._put_bytes, view[:taken_bytes])
        self._put_bytes += taken_bytes
        self.left_bytes -= taken_bytes
        return taken_bytes


class Merger:
    """Puts the slices of portions in their places in a window. The memory is that of a window."""

    def __init__(self, slices: Slices, window_bytes: int = WINDOW_BYTES) -> None:
        self._slices = slices
        self._shares: dict[int, Share] = {}
        self._whole = np.empty(window_bytes, dtype=np.uint8)

    def view(self, window: Window) -> memoryview:
        """The window's bytes; used again by the next window."""
        return self._whole[: window.nbytes].data

    def nbytes_of(self, window: Window, positions: Indices) -> int:
        """How many bytes of a window are a portion's."""
        return self._share(positions).nbytes(window)

    def want(self, window: Window, body: PortionBody, positions: Indices, first_group: int) -> bool:
        """Have the slices of one portion put in their places as they come, unless they are wanted already; whether it
        has any. Bytes of the portion before the window are passed over.
        """
        if body.window == window:
            return True
        share = self._share(positions)
        spans = share.spans(window)
        if not len(spans):
            return False
        body.want(window, share.bytes_before(window, first_group), _Spans(self._whole[: window.nbytes], spans))
        return True

    def _share(self, positions: Indices) -> Share:
        known = self._shares.get(id(positions))
        if known is None:  # it keeps the positions, so that nothing else gets their id
            known = self._shares[id(positions)] = Share(positions, self._slices)
        return known

    async def take(self, window: Window, body: PortionBody, positions: Indices, first_group: int) -> None:
        """Wait until the slices of one portion are in their places. Raises what the portion failed with; then they may
        be taken again, from another body. Two bodies of the same slices may be taken at once: the bytes are the same,
        whoever is later.
        """
        if self.want(window, body, positions, first_group):
            await body.filled()
