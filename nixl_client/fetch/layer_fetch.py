"""A running fetch: wait for its layers, one by one, from any thread; cancel it; know when the buffer is yours again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from descriptors.descriptor import Descriptor
from descriptors.layer_forms import LayerForms
from descriptors.notices import Mode
from descriptors.storage_api import Grant
from nixl_client.fetch.decoding import kept_tokens
from nixl_client.fetch.fetch_ledger import FetchLedger
from nixl_client.session.timing import Timing
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
    """A running fetch of chunks over `transport`. Every wait takes a deadline in seconds and raises TimeoutError past
    it.

    Errors of the request itself are raised by the wait that meets them: CallerError, ChunkUnavailable (with the index
    of the first bad chunk: recompute from there), ServerError. Layers that were ready before stay good.
    """

    def __init__(self, running: FetchLedger, cancel: Callable[[FetchLedger], None], transport: Transport) -> None:
        self._running = running
        self._cancel = cancel
        self.transport = transport

    def wait_admitted(self, timeout_s: float | None = None) -> tuple[Mode, int]:
        """Mode and k, the number of chunks that will come."""
        running = self._running
        return running.wait_until(
            lambda: running.state.chunk_count is not None, timeout_s, "the request is not admitted yet"
        )

    def wait_layer(self, layer_index: int, timeout_s: float | None = None) -> Layer:
        """Block until the layer is complete. In chunk-major mode that is when everything is. Raises ValueError for a
        fetch with places, whose layers are no arrays.
        """
        running, place = self._running, self._running.place
        if place.places:
            raise ValueError("the chunks have places of their own: wait for all of them")
        if not 0 <= layer_index < self.descriptor.num_layers:
            raise IndexError(f"layer {layer_index} of {self.descriptor.num_layers}")
        mode, chunk_count = running.wait_until(
            lambda: running.state.is_ready(layer_index), timeout_s, f"layer {layer_index} is not there"
        )
        kept = running.kept.get(layer_index)
        if running.placed is not None:
            kept = running.placed.finish(layer_index, timeout_s)
        data = place.buffer.layer(layer_index, mode, chunk_count, self.descriptor.layout, place.offset)
        kept = None if kept is None else kept[:chunk_count]
        return Layer(layer_index, chunk_count, data, running.ready_at_s[layer_index], kept)

    def wait(self, timeout_s: float | None = None) -> FetchResult:
        """Block until every layer is complete and the request is answered. Then the buffer is the caller's again, but
        where `given_up` names a server of a cluster that may still write the same bytes: there when the fetch is
        settled.
        """
        running = self._running
        mode, chunk_count = running.wait_until(
            lambda: running.is_complete and running.is_answered, timeout_s, "the fetch is not finished"
        )
        if running.placed is not None:
            for layer_index in range(self.descriptor.num_layers):
                running.placed.finish(layer_index, timeout_s)
        return FetchResult(mode, chunk_count, running.transferred_bytes, running.timing, self.forms)

    def wait_settled(self, timeout_s: float | None = None) -> None:
        """Block until nothing writes into the buffer any more, however the fetch ended."""
        self._running.wait_settled(timeout_s)

    @property
    def descriptor(self) -> Descriptor:
        """The descriptor of the request that is under way."""
        return self._running.descriptor

    @property
    def request_id(self) -> str:
        """The id of the request that is under way: each try has one of its own."""
        return self._running.request_id

    @property
    def given_up(self) -> str:
        """Names of storage servers of a cluster that were given up, with commas between. They may still write bytes
        that are in the buffer already. Another fetch into it has them asked first, and fails where they cannot be.
        """
        return self._running.given_up

    @property
    def grant(self) -> Grant:
        """The rate and the epoch that the server's scheduler gave; known once admitted, 0 where it does not pace."""
        return self._running.state.grant

    @property
    def forms(self) -> LayerForms | None:
        """How the chunks come, with their errors; None where they come exactly, as far as known."""
        return self._running.state.forms

    @property
    def kept_tokens(self) -> int:
        """How many tokens are there in each layer, known once admitted: fewer than came where a codec drops some."""
        _, chunk_count = self._running.shape()
        return kept_tokens(self.forms, chunk_count, self.descriptor.chunk_tokens)

    @property
    def mode(self) -> Mode | None:
        """The order of delivery; None until the request is admitted."""
        return self._running.state.mode

    def ready_at_s(self) -> list[float]:
        """When each complete layer became complete, by the monotonic clock, earliest first."""
        with self._running.changed:
            return sorted(self._running.ready_at_s.values())

    @property
    def began_s(self) -> float:
        """When the fetch began, by the monotonic clock."""
        return self._running.began_s

    @property
    def is_complete(self) -> bool:
        """Whether every layer is complete."""
        return self._running.is_complete

    @property
    def is_settled(self) -> bool:
        """Whether the fetch is over, well or not, and nothing writes into the buffer any more, no decoder either."""
        return self._running.is_settled

    def cancel(self) -> None:
        """Stop the fetch; on return nothing writes into the buffer any more. Raises ObjectCacheError when the server
        could not be asked: then the buffer must not be reused.
        """
        running = self._running
        running.want_no_more()
        if not running.is_over:
            self._cancel(running)
        if running.placed is not None:
            running.placed.close()

    def __enter__(self) -> LayerFetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
