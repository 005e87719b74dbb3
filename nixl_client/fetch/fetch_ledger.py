"""The ledger of a fetch while it runs: transports write it, from their own threads, and LayerFetch waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from descriptors.descriptor import Delivery, Descriptor, OnMissing
from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from descriptors.headers import UNSETTLED_HEADER
from descriptors.layer_forms import LayerForms
from descriptors.notices import Mode, Notice
from descriptors.storage_api import Grant
from nixl_client.fetch.decoding import PlacedLayers, checked_forms, layer_shape
from nixl_client.fetch.delivery_state import DeliveryState, ProtocolViolationError
from nixl_client.session.retries import always
from nixl_client.session.timing import Timing, split_time
from nixl_client.transports.buffers import Buffer
from objectcache.kv_codecs.dropping import Kept


@dataclass(frozen=True, slots=True)
class FetchPlace:
    """The `nbytes` of a buffer, from byte `offset` on, that a fetch fills; with `places` only those bytes where the
    chunks land, each whole, at these bytes after `offset`.
    """

    buffer: Buffer
    offset: int
    nbytes: int
    places: tuple[int, ...] = ()

    @classmethod
    def of(cls, descriptor: Descriptor, buffer: Buffer, offset: int, places: Sequence[int]) -> FetchPlace:
        """The bytes that the delivery may fill. Raises ValueError for places that no descriptor may have, and where the
        buffer ends before.
        """
        nbytes = descriptor.delivery_bytes
        if places:
            if descriptor.delivery is not Delivery.CHUNK_MAJOR or descriptor.accept is not None:
                raise ValueError("places go with chunk-major delivery of exact chunks")
            chunk_bytes = descriptor.layout.chunk_bytes
            steps = np.diff(np.sort(np.array(places, dtype=np.int64)), prepend=-chunk_bytes)
            if len(places) != descriptor.chunk_count or (steps < chunk_bytes).any():
                raise ValueError("there is a place for each chunk, and no two overlap")
            nbytes = max(places) + chunk_bytes
        if offset < 0 or offset + nbytes > buffer.nbytes:
            raise ValueError(f"{nbytes} bytes from {offset} on do not fit {buffer.nbytes}")
        return cls(buffer, offset, nbytes, tuple(places))

    def overlaps(self, other: FetchPlace) -> bool:
        """Whether the two have some of the same bytes."""
        here, there = self.buffer.memory, other.buffer.memory
        start, other_start = here.address + self.offset, there.address + other.offset
        return here.device == there.device and start < other_start + other.nbytes and other_start < start + self.nbytes

    def host_view(self) -> memoryview:
        """The bytes. Raises ValueError for device memory."""
        return self.buffer.host_view()[self.offset : self.offset + self.nbytes]

    def chunk_runs(self, first_chunk: int, chunk_count: int, chunk_bytes: int) -> list[tuple[int, int]]:
        """Start and end, in `host_view`, of the runs of bytes that these chunks fill, in their order."""
        if not self.places:
            return [(first_chunk * chunk_bytes, (first_chunk + chunk_count) * chunk_bytes)]
        starts = np.array(self.places[first_chunk : first_chunk + chunk_count], dtype=np.int64)
        firsts = np.flatnonzero(np.diff(starts, prepend=-chunk_bytes - 1) != chunk_bytes)
        counts = np.diff(firsts, append=len(starts))
        return [
            (start, start + count * chunk_bytes)
            for start, count in zip(starts[firsts].tolist(), counts.tolist(), strict=True)
        ]

    def payload(self) -> Any:
        """The bytes as an array, of the device's where they lie there."""
        return self.buffer.payload(self.offset, self.nbytes)


class FetchLedger:
    """The ledger of one fetch of chunks of `bucket`; `timeout_s` bounds the silence on its request. Safe from any
    thread.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        place: FetchPlace,
        bucket: str,
        timeout_s: float,
        decoders: Executor | None = None,
    ) -> None:
        """With `decoders` layers come into the buffer encoded, where the descriptor accepts that."""
        self.descriptor = descriptor
        self.place = place
        self.bucket = bucket
        self.timeout_s = timeout_s
        self._first_id = self.request_id = descriptor.request_id or ""
        """The id of the request that is under way: each try has one of its own."""
        self._decoders = decoders
        self._try_count = 1
        self._has_told_before = False
        self.is_cancelling = False
        """Whether the caller wants no more of the fetch."""
        self.placed: PlacedLayers | None = None
        """The layers that came encoded into the buffer, and are decoded there."""
        self.kept: dict[int, Kept] = {}
        """The tokens of each layer that are there, where a transport has decoded it."""
        self.state = _new_state(descriptor, self.request_id)
        self.changed = threading.Condition()
        """Held while anything here changes."""
        self.ready_at_s: dict[int, float] = {}
        """When each complete layer became complete, by the monotonic clock."""
        self.transferred_bytes = 0
        self.timing = Timing(0.0, 0.0, 0.0, 0.0)
        self.began_s = time.monotonic()
        self.is_over = False
        """Whether no transport writes into the buffer any more."""
        self.have_writers_ended: Callable[[], bool] = lambda: False
        """Whether all servers that may write into the buffer have surely ended."""
        self.is_answered = False
        self.given_up = ""
        self._violation: ProtocolViolationError | None = None

    @property
    def is_settled(self) -> bool:
        """Whether nothing writes into the buffer any more, no decoder either."""
        return self.is_over and (self.placed is None or self.placed.is_idle)

    @property
    def is_complete(self) -> bool:
        """Whether every layer is complete."""
        return self.state.is_complete

    @property
    def has_layers(self) -> bool:
        """Whether a layer is ready, as far as known. From then on the fetch is not asked for again: the caller may have
        written into that layer.
        """
        return self.state.ready_count > 0

    def shape(self) -> tuple[Mode, int]:
        """Mode and k, once they are known."""
        mode, chunk_count = self.state.mode, self.state.chunk_count
        if mode is None or chunk_count is None:
            raise RuntimeError("waited for the shape, but it is not known")
        return mode, chunk_count

    def wait_until(self, is_true: Callable[[], bool], timeout_s: float | None, problem: str) -> tuple[Mode, int]:
        """Block until this is true, from when on the shape is known, which is returned. Raises TimeoutError with the
        problem, and what the fetch failed with.
        """

        def over() -> bool:
            return is_true() or self.state.failure is not None or self._violation is not None

        with self.changed:
            if not self.changed.wait_for(over, timeout_s):
                raise TimeoutError(f"{problem} after {timeout_s} s")
            if self._violation is not None:
                raise self._violation
            if not is_true() and self.state.failure is not None:
                raise self.state.failure
            return self.shape()

    def wait_settled(self, timeout_s: float | None = None) -> None:
        """Block until nothing writes into the buffer any more, however the fetch ended."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.is_over, timeout_s):
                raise TimeoutError(f"the fetch is not settled after {timeout_s} s")
            placed = self.placed
        if placed is not None:
            placed.drain()

    def wait_reported(self, layer_count: int, timeout_s: float) -> None:
        """Block until that many layers are complete or the storage side has reported a failure, or for `timeout_s`."""

        def reported() -> bool:
            state = self.state
            return state.ready_count >= layer_count or state.failure is not None or self._violation is not None

        with self.changed:
            self.changed.wait_for(reported, timeout_s)

    def want_no_more(self) -> None:
        """The caller cancels."""
        with self.changed:
            self.is_cancelling = True
            self.changed.notify_all()

    def begin_again(self, error: ObjectCacheError) -> bool:
        """Ask for the fetch anew, under another id, after an error that left nothing in flight; whether that may be.
        The caller may know the order and the count of chunks by now, so the same are asked for. Once: what breaks in
        every body is most likely a damaged chunk. Encoded chunks are not asked for again, since they could come in
        other forms.
        """
        with self.changed:
            told = self.state
            is_over = self.is_cancelling or self.is_over or self._violation is not None or told.failure is not None
            if is_over or self.has_layers or error.layer or not always(error):
                return False
            is_told = told.mode is not None and told.chunk_count is not None
            if is_told and (self._has_told_before or told.forms is not None):
                return False
            self._try_count += 1
            self.request_id = f"{self._first_id}.{self._try_count}"
            self.descriptor = replace(self.descriptor, request_id=self.request_id)
            if told.mode is not None and told.chunk_count is not None:
                self._has_told_before = True
                cut = self.descriptor.cut_to(told.chunk_count)
                self.descriptor = replace(cut, delivery=Delivery(told.mode.value))
            self.state = _new_state(self.descriptor, self.request_id)
            self.kept.clear()
            if told.mode is not None and told.chunk_count is not None:
                self.state.start(told.mode, told.chunk_count, told.grant)
            return True

    def pause(self, pause_s: float) -> None:
        """Wait before another try, but no longer than the caller wants the fetch."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_cancelling or self.is_over, pause_s)

    def on_notice(self, notice: Notice) -> None:
        """A notice came. One that contradicts others ends the fetch, since its bytes cannot be trusted. One of an
        earlier try, which has ended, tells nothing.
        """

        def apply() -> None:
            if notice.request_id == self.request_id or not notice.request_id.startswith(self._first_id):
                self.state.apply(notice)

        self._update(apply)

    def on_layer(self, layer_index: int) -> None:
        """The http transport read this layer to its end."""
        self._update(lambda: self.state.mark_ready(layer_index))

    def on_kept(self, layer_index: int, first_chunk: int, kept: Kept) -> None:
        """The http transport decoded these chunks of a layer, and only these tokens are there."""
        with self.changed:
            mine = self.kept.get(layer_index)
            if mine is None:
                shape = self.descriptor.chunk_count, self.descriptor.chunk_tokens
                mine = self.kept[layer_index] = np.ones(shape, dtype=np.bool_)
            mine[first_chunk : first_chunk + len(kept)] = kept

    def on_start(self, mode: Mode, chunk_count: int, grant: Grant, forms: LayerForms | None = None) -> None:
        """The http transport read the answer's head."""

        def start() -> None:
            if forms is not None:
                self.state.set_forms(forms)
            self.state.start(mode, chunk_count, grant)

        self._update(start)

    def on_answer(
        self,
        mode: Mode,
        chunk_count: int,
        transferred_bytes: int,
        headers: Mapping[str, str],
        body_s: float = 0.0,
        forms: LayerForms | None = None,
    ) -> None:
        """The request was answered with success, and with these headers; reading the body took `body_s`."""
        self.transferred_bytes = transferred_bytes
        self.timing = split_time(time.monotonic() - self.began_s, headers, body_s)
        self.given_up = headers.get(UNSETTLED_HEADER, "")
        self.is_answered = True

        def answer() -> None:
            if forms is not None:
                self.state.set_forms(forms)
            self.state.answer(mode, chunk_count)

        self._update(answer)
        if not self.given_up:
            self.settle()

    def on_failure(self, error: ObjectCacheError) -> None:
        """The request failed."""
        self._update(lambda: self.state.fail(error))

    def settle(self) -> None:
        """Nothing writes into the buffer any more."""
        with self.changed:
            self.is_over = self.is_answered = True
            if not self.state.is_complete:
                self.state.fail(ServerError(ErrorCode.CANCELLED, "the fetch was cancelled"))
            self.changed.notify_all()

    def _update(self, change: Callable[[], None]) -> None:
        with self.changed:
            try:
                change()
            except ProtocolViolationError as violation:
                self._violation = violation
            now_s = time.monotonic()
            for layer_index in self.state.take_ready():
                self.ready_at_s[layer_index] = now_s
                self._begin_decoding(layer_index)
            self.changed.notify_all()

    def _begin_decoding(self, layer_index: int) -> None:
        """A layer has come that may be encoded; its forms are known by now."""
        forms, accept = self.state.forms, self.descriptor.accept
        if self._decoders is None or forms is None or forms.is_exact or accept is None or self._violation is not None:
            return
        if self.placed is None:
            layout, (mode, _) = self.descriptor.layout, self.shape()
            self.placed = PlacedLayers(self.place.payload(), layout, mode, forms, layer_shape(layout, accept))
        self.placed.begin(layer_index, self._decoders)


def _new_state(descriptor: Descriptor, request_id: str) -> DeliveryState:
    check_forms = None if descriptor.accept is None else partial(checked_forms, descriptor=descriptor)
    count = descriptor.chunk_count
    least = count if descriptor.on_missing is OnMissing.FAIL else 1
    return DeliveryState(request_id, descriptor.layout, count, check_forms, chunk_count_min=least)
