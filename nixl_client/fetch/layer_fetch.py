"""A running fetch: wait for its layers, one by one, from any thread; cancel it; know when the buffer is yours again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
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
from nixl_client.fetch.decoding import PlacedLayers, checked_forms, kept_tokens, layer_shape
from nixl_client.fetch.delivery_state import DeliveryState, ProtocolViolationError
from nixl_client.session.retries import always
from nixl_client.session.timing import Timing, split_time
from nixl_client.transports.buffers import Buffer
from nixl_client.transports.transport import Transport
from objectcache.kv_codecs.dropping import Kept


@dataclass(frozen=True, slots=True)
class Layer:
    """A complete layer: `data` is uint8 of shape (chunk_count, S) in the caller's buffer, `ready_at_s` the monotonic
    time at which the layer was known to be complete. `kept` is there where a codec has dropped tokens, which only
    happens where the fetch accepts such a codec: bool of shape (chunk_count, chunk_tokens), whether a token is there.
    The others are zeros, to which no attention must be paid.
    """

    layer_index: int
    chunk_count: int
    data: Any
    ready_at_s: float
    kept: Kept | None = None


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The result of a fetch that succeeded. `transferred_bytes` is what the server's transport counted, `timing` where
    the time from the fetch's start to its end went, and `forms` how the chunks came, with their errors; None where all
    came exactly.
    """

    mode: Mode
    chunk_count: int
    transferred_bytes: int
    timing: Timing
    forms: LayerForms | None = None


class LayerFetch:
    """A running fetch of chunks of `bucket`, over `transport`; `timeout_s` bounds the silence on its request. Every
    wait takes a deadline in seconds and raises TimeoutError past it.

    Errors of the request itself are raised by the wait that meets them: CallerError, ChunkUnavailable (with the index
    of the first bad chunk: recompute from there), ServerError. Layers that were ready before stay good.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        buffer: Buffer,
        offset: int,
        cancel: Callable[[LayerFetch], None],
        transport: Transport,
        bucket: str,
        timeout_s: float,
        decoders: Executor | None = None,
    ) -> None:
        """With `decoders` layers come into the buffer encoded, where the descriptor accepts that."""
        self.transport = transport
        self.bucket = bucket
        self.timeout_s = timeout_s
        self.descriptor = descriptor
        self._first_id = self.request_id = descriptor.request_id or ""
        """The id of the request that is under way: each try has one of its own."""
        self._buffer = buffer
        self._offset = offset
        self._cancel = cancel
        self._decoders = decoders
        self._try_count = 1
        self._has_told_before = False
        self._is_cancelling = False
        self._placed: PlacedLayers | None = None
        self._kept: dict[int, Kept] = {}
        """The tokens of each layer that are there, where a transport has decoded it."""
        self._state = self._new_state()
        self._changed = threading.Condition()
        self._ready_at_s: dict[int, float] = {}
        self._transferred_bytes = 0
        self._timing = Timing(0.0, 0.0, 0.0, 0.0)
        self._began_s = time.monotonic()
        self._settled = False
        self._is_answered = False
        self.given_up = ""
        """Names of storage servers of a cluster that were given up, with commas between. They may still write bytes
        that are in the buffer already. Another fetch into it has them asked first, and fails where they cannot be.
        """
        self._violation: ProtocolViolationError | None = None

    def wait_admitted(self, timeout_s: float | None = None) -> tuple[Mode, int]:
        """Mode and k, the number of chunks that will come."""
        with self._changed:
            self._wait_for(lambda: self._state.chunk_count is not None, timeout_s, "the request is not admitted yet")
            return self._shape()

    def wait_layer(self, layer_index: int, timeout_s: float | None = None) -> Layer:
        """Block until the layer is complete. In chunk-major mode that is when everything is."""
        if not 0 <= layer_index < self.descriptor.num_layers:
            raise IndexError(f"layer {layer_index} of {self.descriptor.num_layers}")
        with self._changed:
            self._wait_for(lambda: self._state.is_ready(layer_index), timeout_s, f"layer {layer_index} is not there")
            mode, chunk_count = self._shape()
            placed, kept = self._placed, self._kept.get(layer_index)
        if placed is not None:
            kept = placed.finish(layer_index, timeout_s)
        data = self._buffer.layer(layer_index, mode, chunk_count, self.descriptor.layout, self._offset)
        kept = None if kept is None else kept[:chunk_count]
        return Layer(layer_index, chunk_count, data, self._ready_at_s[layer_index], kept)

    def wait(self, timeout_s: float | None = None) -> FetchResult:
        """Block until every layer is complete and the request is answered. Then the buffer is the caller's again, but
        where `given_up` names a server of a cluster that may still write the same bytes: there when the fetch is
        settled.
        """
        with self._changed:
            self._wait_for(
                lambda: self._state.is_complete and self._is_answered, timeout_s, "the fetch is not finished"
            )
            mode, chunk_count = self._shape()
            placed = self._placed
        for layer_index in range(0 if placed is None else self.descriptor.num_layers):
            assert placed is not None
            placed.finish(layer_index, timeout_s)
        return FetchResult(mode, chunk_count, self._transferred_bytes, self._timing, self.forms)

    @property
    def grant(self) -> Grant:
        """The rate and the epoch that the server's scheduler gave; known once admitted, 0 where it does not pace."""
        return self._state.grant

    @property
    def forms(self) -> LayerForms | None:
        """How the chunks come, with their errors; None where they come exactly, as far as known."""
        return self._state.forms

    @property
    def kept_tokens(self) -> int:
        """How many tokens are there in each layer, known once admitted: fewer than came where a codec drops some."""
        _, chunk_count = self._shape()
        return kept_tokens(self.forms, chunk_count, self.descriptor.chunk_tokens)

    @property
    def mode(self) -> Mode | None:
        """The order of delivery; None until the request is admitted."""
        return self._state.mode

    def ready_at_s(self) -> list[float]:
        """When each complete layer became complete, by the monotonic clock, earliest first."""
        with self._changed:
            return sorted(self._ready_at_s.values())

    @property
    def began_s(self) -> float:
        """When the fetch began, by the monotonic clock."""
        return self._began_s

    @property
    def is_complete(self) -> bool:
        """Whether every layer is complete."""
        return self._state.is_complete

    @property
    def is_settled(self) -> bool:
        """Whether the fetch is over, well or not, and nothing writes into the buffer any more, no decoder either."""
        return self._settled and (self._placed is None or self._placed.is_idle)

    def cancel(self) -> None:
        """Stop the fetch; on return nothing writes into the buffer any more. Raises ObjectCacheError when the server
        could not be asked: then the buffer must not be reused.
        """
        with self._changed:
            self._is_cancelling = True
            self._changed.notify_all()
        if not self._settled:
            self._cancel(self)
        if self._placed is not None:
            self._placed.close()

    def __enter__(self) -> LayerFetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def shares_memory_with(self, other: LayerFetch) -> bool:
        """Whether the two fetches fill some of the same bytes."""
        here, there = self._buffer.memory, other._buffer.memory
        start, other_start = here.address + self._offset, there.address + other._offset
        end = start + self.descriptor.delivery_bytes
        other_end = other_start + other.descriptor.delivery_bytes
        return here.device == there.device and start < other_end and other_start < end

    def host_view(self) -> memoryview:
        """The payload's part of the buffer. Raises ValueError for device memory."""
        return self._buffer.host_view()[self._offset : self._offset + self.descriptor.delivery_bytes]

    def _shape(self) -> tuple[Mode, int]:
        mode, chunk_count = self._state.mode, self._state.chunk_count
        if mode is None or chunk_count is None:
            raise RuntimeError("waited for the shape, but it is not known")
        return mode, chunk_count

    def _wait_for(self, is_true: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        def over() -> bool:
            return is_true() or self._state.failure is not None or self._violation is not None

        if not self._changed.wait_for(over, timeout_s):
            raise TimeoutError(f"{what} after {timeout_s} s")
        if self._violation is not None:
            raise self._violation
        if not is_true() and self._state.failure is not None:
            raise self._state.failure

    def _new_state(self) -> DeliveryState:
        descriptor = self.descriptor
        check_forms = None if descriptor.accept is None else partial(checked_forms, descriptor=descriptor)
        count = descriptor.chunk_count
        least = count if descriptor.on_missing is OnMissing.FAIL else 1
        return DeliveryState(self.request_id, descriptor.layout, count, check_forms, chunk_count_min=least)

    # The methods below are for the transports, which call them from their own threads.

    @property
    def is_cancelling(self) -> bool:
        """Whether the caller wants no more of the fetch."""
        return self._is_cancelling

    @property
    def has_layers(self) -> bool:
        """Whether a layer is ready, as far as known. From then on the fetch is not asked for again: the caller may have
        written into that layer.
        """
        return self._state.ready_count > 0

    def begin_again(self, error: ObjectCacheError) -> bool:
        """Ask for the fetch anew, under another id, after an error that left nothing in flight; whether that may be.
        The caller may know the order and the count of chunks by now, so the same are asked for. Once: what breaks in
        every body is most likely a damaged chunk. Encoded chunks are not asked for again, since they could come in
        other forms.
        """
        with self._changed:
            told = self._state
            is_over = self._is_cancelling or self._settled or self._violation is not None or told.failure is not None
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
                self.descriptor = replace(
                    self.descriptor,
                    chunk_keys=self.descriptor.chunk_keys[: told.chunk_count],
                    on_missing=OnMissing.FAIL,
                    delivery=Delivery(told.mode.value),
                )
            self._state = self._new_state()
            self._kept.clear()
            if told.mode is not None and told.chunk_count is not None:
                self._state.start(told.mode, told.chunk_count, told.grant)
            return True

    def pause(self, pause_s: float) -> None:
        """Wait before another try, but no longer than the caller wants the fetch."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelling or self._settled, pause_s)

    def on_notice(self, notice: Notice) -> None:
        """A notice came. One that contradicts others ends the fetch, since its bytes cannot be trusted. One of an
        earlier try, which has ended, tells nothing.
        """

        def apply() -> None:
            if notice.request_id == self.request_id or not notice.request_id.startswith(self._first_id):
                self._state.apply(notice)

        self._update(apply)

    def on_layer(self, layer_index: int) -> None:
        """The http transport read this layer to its end."""
        self._update(lambda: self._state.mark_ready(layer_index))

    def on_kept(self, layer_index: int, first_chunk: int, kept: Kept) -> None:
        """The http transport decoded these chunks of a layer, and only these tokens are there."""
        with self._changed:
            mine = self._kept.get(layer_index)
            if mine is None:
                shape = self.descriptor.chunk_count, self.descriptor.chunk_tokens
                mine = self._kept[layer_index] = np.ones(shape, dtype=np.bool_)
            mine[first_chunk : first_chunk + len(kept)] = kept

    def on_start(self, mode: Mode, chunk_count: int, grant: Grant, forms: LayerForms | None = None) -> None:
        """The http transport read the answer's head."""

        def start() -> None:
            if forms is not None:
                self._state.set_forms(forms)
            self._state.start(mode, chunk_count, grant)

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
        self._transferred_bytes = transferred_bytes
        self._timing = split_time(time.monotonic() - self._began_s, headers, body_s)
        self.given_up = headers.get(UNSETTLED_HEADER, "")
        self._is_answered = True

        def answer() -> None:
            if forms is not None:
                self._state.set_forms(forms)
            self._state.answer(mode, chunk_count)

        self._update(answer)
        if not self.given_up:
            self.settle()

    def wait_reported(self, layer_count: int, timeout_s: float) -> None:
        """Block until that many layers are complete or the storage side has reported a failure, or for `timeout_s`."""

        def reported() -> bool:
            state = self._state
            return state.ready_count >= layer_count or state.failure is not None or self._violation is not None

        with self._changed:
            self._changed.wait_for(reported, timeout_s)

    def on_failure(self, error: ObjectCacheError) -> None:
        """The request failed."""
        self._update(lambda: self._state.fail(error))

    def wait_settled(self, timeout_s: float | None = None) -> None:
        """Block until nothing writes into the buffer any more, however the fetch ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._settled, timeout_s):
                raise TimeoutError(f"the fetch is not settled after {timeout_s} s")
            placed = self._placed
        if placed is not None:
            placed.drain()

    def settle(self) -> None:
        """Nothing writes into the buffer any more."""
        with self._changed:
            self._settled = self._is_answered = True
            if not self._state.is_complete:
                self._state.fail(ServerError(ErrorCode.CANCELLED, "the fetch was cancelled"))
            self._changed.notify_all()

    def _update(self, change: Callable[[], None]) -> None:
        with self._changed:
            try:
                change()
            except ProtocolViolationError as violation:
                self._violation = violation
            now_s = time.monotonic()
            for layer_index in self._state.take_ready():
                self._ready_at_s[layer_index] = now_s
                self._begin_decoding(layer_index)
            self._changed.notify_all()

    def _begin_decoding(self, layer_index: int) -> None:
        """A layer has come that may be encoded; its forms are known by now."""
        forms, accept = self._state.forms, self.descriptor.accept
        if self._decoders is None or forms is None or forms.is_exact or accept is None or self._violation is not None:
            return
        if self._placed is None:
            layout, (mode, _) = self.descriptor.layout, self._shape()
            payload = self._buffer.payload(self._offset, self.descriptor.delivery_bytes)
            self._placed = PlacedLayers(payload, layout, mode, forms, layer_shape(layout, accept))
        self._placed.begin(layer_index, self._decoders)
