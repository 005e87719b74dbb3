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

import numpy as np

from descriptors.placement import Indices
from descriptors.storage_api import DeliveryStart, Patience, Spans
from descriptors.units import MIB
from gateway.cluster.members import STALL_S

WINDOW_BYTES = 4 * MIB


class Overtaken(Exception):
    """Others have brought what the reader of a portion waits for."""


class PortionBody:
    """The body of one portion, as a BodySink for the storage side and as a reader for the merge. The storage side
    waits in `write` until its bytes have been taken, so that nothing of a portion is kept here but the bytes that its
    connection has just brought. When nothing has come for `stall_s`, `require_alive` is called, which raises where the
    portion's server is gone.
    """

    def __init__(self, require_alive: Callable[[], Awaitable[None]], stall_s: float = STALL_S) -> None:
        self._require_alive = require_alive
        self._stall_s = stall_s
        self._start: DeliveryStart | None = None
        self._view = memoryview(b"")
        self._came = asyncio.Event()
        self._taken = asyncio.Event()
        self._failure: Exception | None = None
        self.read_bytes = 0
        """How many bytes have been taken."""

    async def begin(self, start: DeliveryStart) -> None:
        """Note that the portion begins."""
        self._start = start
        self._came.set()

    async def write(self, view: memoryview) -> None:
        """Offer bytes, and wait until they are taken."""
        if not view.nbytes:
            return
        self._view = view.cast("B")
        self._taken.clear()
        self._came.set()
        await self._taken.wait()

    async def send(self, spans: Spans, patience: Patience) -> None:
        """Offer memory of this process, as a storage side in it does."""
        for address, nbytes in spans:
            await self.write(memoryview((ctypes.c_char * int(nbytes)).from_address(int(address))))

    def abort(self) -> None:
        """Note that the body was cut short; `fail` says why."""
        self._view = memoryview(b"")

    def fail(self, error: Exception) -> None:
        """End the body with an error, which the reader gets."""
        self._view = memoryview(b"")
        self._failure = error
        self._came.set()

    def overtake(self) -> None:
        """End the body because others have brought its bytes: the reader gets Overtaken."""
        self.fail(Overtaken())

    async def started(self) -> DeliveryStart:
        """The facts that the portion begins with. Raises what the portion failed with."""
        while self._start is None:
            await self._wait()
        return self._start

    async def read_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes. Raises what the portion failed with."""
        at = 0
        while at < len(target):
            taken = await self._take(len(target) - at)
            target[at : at + len(taken)] = taken
            at += len(taken)
            self._let_go(len(taken))

    async def skip_to(self, at: int) -> None:
        """Pass over the bytes before byte `at` of the body. Raises what the portion failed with."""
        while self.read_bytes < at:
            self._let_go(len(await self._take(at - self.read_bytes)))

    async def _take(self, nbytes_max: int) -> memoryview:
        while not self._view:
            await self._wait()
        return self._view[:nbytes_max]

    def _let_go(self, nbytes: int) -> None:
        self._view = self._view[nbytes:]
        self.read_bytes += nbytes
        if not self._view:
            self._taken.set()

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            async with asyncio.timeout(self._stall_s):
                await self._came.wait()
        except TimeoutError:
            await self._require_alive()
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


def windows(
    group_count: int, chunk_count: int, slice_bytes: int, window_bytes: int, first_group: int = 0
) -> Iterator[Window]:
    """The windows of a delivery, in order."""
    if slice_bytes <= window_bytes:
        per_window = window_bytes // slice_bytes
        for group in range(first_group, group_count):
            for first in range(0, chunk_count, per_window):
                end = min(first + per_window, chunk_count)
                yield Window(group, first, end, 0, (end - first) * slice_bytes)
        return
    for group in range(first_group, group_count):
        for index in range(chunk_count):
            for start in range(0, slice_bytes, window_bytes):
                yield Window(group, index, index + 1, start, min(window_bytes, slice_bytes - start))


def bytes_before(positions: Indices, window: Window, slice_bytes: int, first_group: int) -> int:
    """How many bytes of a portion, whose body begins with `first_group`, lie before a window."""
    before = int(np.searchsorted(positions, window.first))
    inside = window.start if before < len(positions) and int(positions[before]) == window.first else 0
    return ((window.group - first_group) * len(positions) + before) * slice_bytes + inside


class Merger:
    """Puts the slices of portions in their places in a window. The memory is that of a window, and of each portion's
    slices while they come.
    """

    def __init__(self, slice_bytes: int, window_bytes: int = WINDOW_BYTES) -> None:
        self._slice_bytes = slice_bytes
        self._whole = np.empty(window_bytes, dtype=np.uint8)

    def view(self, window: Window) -> memoryview:
        """The window's bytes; used again by the next window."""
        return self._whole[: window.nbytes].data

    def nbytes_of(self, window: Window, positions: Indices) -> int:
        """How many bytes of a window are a portion's."""
        low, high = np.searchsorted(positions, (window.first, window.end)).tolist()
        return int((high - low) * window.nbytes // (window.end - window.first))

    async def take(self, window: Window, body: PortionBody, positions: Indices, first_group: int) -> None:
        """Bring the slices of one portion to their places. Bytes of the portion before the window are passed over.
        Raises what the portion failed with; then it may be taken again, from another body. Two bodies of the same
        slices may be taken at once: the bytes are the same, whoever is later.
        """
        low, high = np.searchsorted(positions, (window.first, window.end)).tolist()
        if low == high:
            return
        await body.skip_to(bytes_before(positions, window, self._slice_bytes, first_group))
        whole = self._whole[: window.nbytes]
        if high - low == window.end - window.first:
            await body.read_into(whole.data)
            return
        apart = np.empty((high - low) * self._slice_bytes, dtype=np.uint8)
        await body.read_into(apart.data)
        slices = whole.reshape(window.end - window.first, self._slice_bytes)
        slices[positions[low:high] - window.first] = apart.reshape(high - low, self._slice_bytes)
