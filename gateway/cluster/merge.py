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

WINDOW_BYTES = 4 * MIB
Bytes = npt.NDArray[np.uint8]


class Overtaken(Exception):
    """Others have brought what the reader of a portion waits for."""


class Places(Protocol):
    """Where the bytes of a portion go, in order."""

    left_bytes: int

    def put(self, view: memoryview) -> int:
        """Take bytes, as many as there is room for, and say how many."""


class PortionBody:
    """The body of one portion, as a BodySink for the storage side and as a reader for the merge. The storage side puts
    bytes into their places as they come, and waits where nobody wants any, so that nothing of a portion is kept here
    but the bytes that its connection has just brought. When nothing has come for `stall_s`, `require_alive` is called,
    which raises where the portion's server is gone.
    """

    def __init__(self, require_alive: Callable[[], Awaitable[None]], stall_s: float = STALL_S) -> None:
        self._require_alive = require_alive
        self._stall_s = stall_s
        self._start: DeliveryStart | None = None
        self._places: Places | None = None
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

    def want(self, window: Window, at: int, places: Places) -> None:
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


class _Run:
    """Places one after the other."""

    def __init__(self, target: memoryview) -> None:
        self._target = target
        self.left_bytes = len(target)

    def put(self, view: memoryview) -> int:
        """As Places."""
        taken_bytes = min(len(view), self.left_bytes)
        at = len(self._target) - self.left_bytes
        self._target[at : at + taken_bytes] = view[:taken_bytes]
        self.left_bytes -= taken_bytes
        return taken_bytes


class _Slices:
    """Places of slices that lie apart: rows of an array, in ascending order."""

    def __init__(self, slices: Bytes, rows: Indices) -> None:
        self._slices = slices
        self._rows = rows
        self.left_bytes = len(rows) * slices.shape[1]

    def put(self, view: memoryview) -> int:
        """As Places. Whole slices are put at once, and the parts of slices at both ends of what came."""
        slice_bytes = int(self._slices.shape[1])
        taken_bytes: int = min(len(view), self.left_bytes)
        data = np.frombuffer(view[:taken_bytes], dtype=np.uint8)
        row, start = divmod(len(self._rows) * slice_bytes - self.left_bytes, slice_bytes)
        self.left_bytes -= taken_bytes
        if start:
            head = data[: slice_bytes - start]
            self._slices[self._rows[row], start : start + len(head)] = head
            data, row = data[len(head) :], row + 1
        whole = len(data) // slice_bytes
        if whole:
            self._slices[self._rows[row : row + whole]] = data[: whole * slice_bytes].reshape(whole, slice_bytes)
        tail = data[whole * slice_bytes :]
        if len(tail):
            self._slices[self._rows[row + whole], : len(tail)] = tail
        return taken_bytes


class Merger:
    """Puts the slices of portions in their places in a window. The memory is that of a window."""

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

    def want(self, window: Window, body: PortionBody, positions: Indices, first_group: int) -> bool:
        """Have the slices of one portion put in their places as they come, unless they are wanted already; whether it
        has any. Bytes of the portion before the window are passed over.
        """
        low, high = np.searchsorted(positions, (window.first, window.end)).tolist()
        if low == high:
            return False
        if body.window != window:
            whole = self._whole[: window.nbytes]
            places: Places = _Run(whole.data)
            if high - low < window.end - window.first:
                slices = whole.reshape(window.end - window.first, self._slice_bytes)
                places = _Slices(slices, positions[low:high] - window.first)
            body.want(window, bytes_before(positions, window, self._slice_bytes, first_group), places)
        return True

    async def take(self, window: Window, body: PortionBody, positions: Indices, first_group: int) -> None:
        """Wait until the slices of one portion are in their places. Raises what the portion failed with; then they may
        be taken again, from another body. Two bodies of the same slices may be taken at once: the bytes are the same,
        whoever is later.
        """
        if self.want(window, body, positions, first_group):
            await body.filled()
