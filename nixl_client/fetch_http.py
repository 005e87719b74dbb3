"""Fetches over http: the payload is the answer's body, read into the buffer by one of our threads; or the bodies of
several answers, each to a request of its own for some of the chunks, on a connection of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from descriptors.descriptor import Delivery, Descriptor, OnMissing
from descriptors.descriptor_codec import encode_binary
from descriptors.errors import ChunkUnavailable, ErrorCode, ObjectCacheError, ServerError
from descriptors.notices import Mode
from descriptors.storage_api import Grant
from nixl_client.answers import grant, payload_shape
from nixl_client.fetch import LayerFetch
from nixl_client.http import SignedHttp, Stream, UnansweredError

SPLIT_BYTES_MIN = 32 << 20
"""Smaller payloads are over before another connection helps."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """The request for the chunks of a fetch from `first_chunk` on."""

    first_chunk: int
    descriptor: Descriptor


def split(descriptor: Descriptor, connection_count: int, chunk_count: int, attempt: int = 0) -> list[Part]:
    """The requests for the first `chunk_count` chunks, each for about as many of them, with ids that differ from those
    of other attempts. What is split comes layer by layer, unless chunk-major delivery is asked for: parts must not
    differ in that.
    """
    keys = descriptor.chunk_keys[:chunk_count]
    is_large = len(keys) * descriptor.layout.chunk_bytes >= SPLIT_BYTES_MIN
    count = min(connection_count, len(keys)) if is_large else 1
    if count == 1 and keys == descriptor.chunk_keys:
        return [Part(0, descriptor)]
    delivery = Delivery.LAYER_MAJOR if descriptor.delivery is Delivery.AUTO and count > 1 else descriptor.delivery
    bounds = [index * len(keys) // count for index in range(count + 1)]
    return [
        Part(
            first,
            replace(
                descriptor,
                chunk_keys=keys[first:end],
                delivery=delivery,
                request_id=f"{descriptor.request_id}.{attempt}.{index}",
            ),
        )
        for index, (first, end) in enumerate(pairwise(bounds))
    ]


class HttpFetches:
    """Runs fetches over http, each over up to `connection_count` connections."""

    def __init__(self, http: SignedHttp, connection_count: int = 1) -> None:
        self._http = http
        self._connection_count = connection_count
        self._running: dict[str, _Reading] = {}
        self._cancelled: set[str] = set()

    def run(self, fetch: LayerFetch) -> None:
        """POST the descriptor, whole or in parts, and read the bodies; returns when the fetch is settled."""
        try:
            chunk_count: int | None = fetch.descriptor.chunk_count
            attempt = 0
            while chunk_count is not None:
                parts = split(fetch.descriptor, self._connection_count, chunk_count, attempt)
                reading = self._running[fetch.request_id] = _Reading(self._http, fetch, parts)
                if fetch.request_id in self._cancelled:
                    return
                chunk_count = reading.run()
                attempt += 1
        except ObjectCacheError as error:
            fetch.on_failure(error)
        except Exception as error:
            _log.exception("fetch %s", fetch.request_id)
            fetch.on_failure(ServerError(ErrorCode.INTERNAL_ERROR, f"the client failed: {error}"))
        finally:
            self._running.pop(fetch.request_id, None)
            self._cancelled.discard(fetch.request_id)
            fetch.settle()

    def cancel(self, fetch: LayerFetch) -> None:
        """Only our own threads write into the buffer; they end with their connections."""
        if not fetch.is_settled:
            self._cancelled.add(fetch.request_id)
        reading = self._running.get(fetch.request_id)
        if reading is not None:
            reading.stop()
        fetch.wait_settled()
        self._cancelled.discard(fetch.request_id)


class _Reading:
    """The requests of one fetch, and what has come of them. A thread for each, and the caller's for the first."""

    def __init__(self, http: SignedHttp, fetch: LayerFetch, parts: Sequence[Part]) -> None:
        self._http = http
        self._fetch = fetch
        self._parts = parts
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._is_over = False
        self._grants: list[Grant] = []
        self._parts_missing = [len(parts)] * fetch.descriptor.num_layers
        self._chunk_count = sum(part.descriptor.chunk_count for part in parts)
        self._short: int | None = None
        self._failures: list[tuple[int, Exception]] = []
        self._ended: tuple[Mode, dict[str, str], float] | None = None

    def run(self) -> int | None:
        """Read everything. Fewer chunks than asked for, where other parts have placed theirs for more: how many to ask
        for instead. Raises what ended it.
        """
        threads = [
            threading.Thread(target=self._read_part, args=(part,), name="objectcache-part") for part in self._parts[1:]
        ]
        for thread in threads:
            thread.start()
        self._read_part(self._parts[0])
        for thread in threads:
            thread.join()
        if self._short is not None:
            return self._short
        if self._failures:
            raise min(self._failures, key=lambda failure: failure[0])[1]
        if self._ended is not None:
            mode, headers, body_s = self._ended
            nbytes = self._fetch.descriptor.layout.payload_bytes(self._chunk_count)
            self._fetch.on_answer(mode, self._chunk_count, nbytes, headers, body_s)
        return None

    def stop(self) -> None:
        """End every request: the server is told, and the connections are broken."""
        with self._lock:
            self._is_over = True
        for part in self._parts:
            try:
                self._http.request("DELETE", f"/_objectcache/requests/{part.descriptor.request_id}")
            except UnansweredError:
                break  # nor would it answer for the others
            except ObjectCacheError:
                continue
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.abort()

    def _read_part(self, part: Part) -> None:
        stream: Stream | None = None
        try:
            body = encode_binary(part.descriptor)
            stream = self._http.stream("POST", f"/{self._fetch.bucket}", {"layerwise": ""}, body, self._fetch.timeout_s)
            with self._lock:
                self._streams.append(stream)
                is_over = self._is_over
            if not is_over:
                self._read(part, stream)
        except Exception as error:
            self._failed(part, error)
        finally:
            if stream is not None:
                stream.close()

    def _read(self, part: Part, stream: Stream) -> None:
        began_s = time.monotonic()
        mode, chunk_count = payload_shape(stream.headers)
        if len(self._parts) == 1:
            self._chunk_count = chunk_count
        elif chunk_count != part.descriptor.chunk_count:
            self._is_short(part, part.first_chunk + chunk_count)
            return
        self._admitted(mode, grant(stream.headers))
        layout = self._fetch.descriptor.layout
        view = self._fetch.host_view()
        if mode is Mode.LAYER_MAJOR:
            layer_bytes, nbytes = layout.layer_bytes(self._chunk_count), layout.layer_bytes(chunk_count)
            first = layout.layer_bytes(part.first_chunk)
            for layer_index in range(layout.num_layers):
                start = layer_index * layer_bytes + first
                stream.read_into(view[start : start + nbytes])
                self._has_layer(layer_index)
        else:
            first = layout.payload_bytes(part.first_chunk)
            stream.read_into(view[first : first + layout.payload_bytes(chunk_count)])
        with self._lock:
            self._ended = mode, stream.headers, time.monotonic() - began_s

    def _admitted(self, mode: Mode, granted: Grant) -> None:
        """Once all are: no layer is whole before."""
        with self._lock:
            self._grants.append(granted)
            if len(self._grants) == len(self._parts):
                rate = sum(each.rate_bytes_per_s for each in self._grants)
                self._fetch.on_start(mode, self._chunk_count, Grant(rate, self._grants[0].epoch))

    def _has_layer(self, layer_index: int) -> None:
        with self._lock:
            self._parts_missing[layer_index] -= 1
            if not self._parts_missing[layer_index]:
                self._fetch.on_layer(layer_index)

    def _failed(self, part: Part, error: Exception) -> None:
        if isinstance(error, ChunkUnavailable) and part.first_chunk:
            is_prefix = part.descriptor.on_missing is OnMissing.PREFIX and error.layer is None
            if is_prefix and error.code is not ErrorCode.CHUNK_CORRUPT:
                self._is_short(part, part.first_chunk + (error.index or 0))
                return
            index = part.first_chunk + (error.index or 0)
            error = ChunkUnavailable(error.code, error.message, field=error.field, index=index, layer=error.layer)
        with self._lock:
            if not self._is_over:
                self._failures.append((part.first_chunk, error))
        self._end_others(part)

    def _is_short(self, part: Part, chunk_count: int) -> None:
        """No more than so many chunks can be had: where the layers of the others lie, they do not belong."""
        with self._lock:
            self._short = min(chunk_count, self._chunk_count if self._short is None else self._short)
        self._end_others(part)

    def _end_others(self, part: Part) -> None:
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        if is_first and len(self._parts) > 1:
            self.stop()
