"""Fetches over http: the payload is the body of an answer, which one of our threads reads into the buffer.

A large payload may be split among several requests, called subrequests, each for some of the chunks and on a connection
of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from descriptors.descriptor import Delivery, Descriptor, OnMissing
from descriptors.descriptor_codec import encode_binary
from descriptors.errors import ChunkUnavailable, ErrorCode, ObjectCacheError, ServerError
from descriptors.headers import REQUESTS_PATH
from descriptors.layer_forms import LayerForms, greatest_loss
from descriptors.notices import Mode
from descriptors.storage_api import Grant
from nixl_client.fetch.decoding import Packed, checked_forms, forms_in, host_bytes, is_too_new, layer_shape
from nixl_client.fetch.delivery_state import granted_rate, payload_shape
from nixl_client.fetch.fetch_ledger import FetchLedger
from nixl_client.session.signed_http import SignedHttp
from nixl_client.transports.http import Stream, UnansweredError

SPLIT_BYTES_MIN = 32 << 20
"""A smaller payload has been read before a second connection could help."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Subrequest:
    """A request for some chunks of a fetch, of which `first_chunk` is the first."""

    first_chunk: int
    descriptor: Descriptor


def split_request(
    descriptor: Descriptor, connection_count: int, chunk_count: int, attempt: int = 0
) -> list[Subrequest]:
    """The subrequests for the first `chunk_count` chunks, each for about as many of them, with ids that differ from
    those of other attempts. All subrequests have the same order of delivery, since each fills its own part of every
    layer: layer-major, unless the fetch asks for chunk-major.
    """
    keys = descriptor.chunk_keys[:chunk_count]
    is_large = len(keys) * descriptor.layout.chunk_bytes >= SPLIT_BYTES_MIN
    count = min(connection_count, len(keys)) if is_large else 1
    if count == 1 and keys == descriptor.chunk_keys:
        return [Subrequest(0, descriptor)]
    delivery = Delivery.LAYER_MAJOR if descriptor.delivery is Delivery.AUTO and count > 1 else descriptor.delivery
    bounds = [index * len(keys) // count for index in range(count + 1)]
    return [
        Subrequest(
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
        self._running: dict[FetchLedger, _Reading] = {}

    def run(self, fetch: FetchLedger) -> None:
        """POST the descriptor, whole or as subrequests, and read the bodies; returns when the fetch is settled. It is
        POSTed again, under another id, where it fails before a layer is ready.
        """
        try:
            self._http.retries.run(
                lambda left_s: self._try(fetch, left_s), fetch.timeout_s, fetch.begin_again, fetch.pause
            )
        except ObjectCacheError as error:
            fetch.on_failure(error)
        except Exception as error:
            _log.exception("fetch %s", fetch.request_id)
            fetch.on_failure(ServerError(ErrorCode.INTERNAL_ERROR, f"the client failed: {error}"))
        finally:
            self._running.pop(fetch, None)
            fetch.settle()

    def _try(self, fetch: FetchLedger, timeout_s: float) -> None:
        chunk_count: int | None = fetch.descriptor.chunk_count
        attempt = 0
        while chunk_count is not None:
            subrequests = split_request(fetch.descriptor, self._connection_count, chunk_count, attempt)
            reading = self._running[fetch] = _Reading(self._http, fetch, subrequests, timeout_s)
            if fetch.is_cancelling:
                return
            chunk_count = reading.run()
            attempt += 1

    def cancel(self, fetch: FetchLedger) -> None:
        """Break the connections. Only our own threads write into the buffer, and they end with their connections."""
        reading = self._running.get(fetch)
        if reading is not None:
            reading.stop()
        fetch.wait_settled()


class _Reading:
    """One attempt: the subrequests, what they have brought, and a thread for each but the first, which the caller's
    thread reads.
    """

    def __init__(
        self, http: SignedHttp, fetch: FetchLedger, subrequests: Sequence[Subrequest], timeout_s: float
    ) -> None:
        self._http = http
        self._fetch = fetch
        self._timeout_s = timeout_s
        self._subrequests = subrequests
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._is_over = False
        self._grants: list[Grant] = []
        self._missing_counts = [len(subrequests)] * fetch.descriptor.num_layers
        self._chunk_count = sum(subrequest.descriptor.chunk_count for subrequest in subrequests)
        self._forms: dict[int, LayerForms] = {}
        """The forms of each subrequest's chunks, by its first one."""
        self._stored_count: int | None = None
        self._failures: list[tuple[int, Exception]] = []
        self._ended: tuple[Mode, Mapping[str, str], float] | None = None

    def run(self) -> int | None:
        """Read everything. Returns None when all is read. Returns a chunk count when fewer chunks are stored: the other
        subrequests placed their bytes for more chunks, so that the fetch is begun again for that many. Raises the error
        of the first chunks that failed.
        """
        threads = [
            threading.Thread(target=self._read_subrequest, args=(subrequest,), name="objectcache-subrequest")
            for subrequest in self._subrequests[1:]
        ]
        for thread in threads:
            thread.start()
        self._read_subrequest(self._subrequests[0])
        for thread in threads:
            thread.join()
        if self._stored_count is not None:
            return self._stored_count
        if self._failures:
            raise min(self._failures, key=lambda failure: failure[0])[1]
        if self._ended is not None:
            mode, headers, body_s = self._ended
            forms, layout = self._whole_forms(), self._fetch.descriptor.layout
            nbytes = layout.delivery_bytes(self._chunk_count)
            if forms is not None:
                nbytes = layout.num_layers * int(forms.layer_bytes.sum())
            self._fetch.on_answer(
                mode, self._chunk_count, transferred_bytes=nbytes, headers=headers, body_s=body_s, forms=forms
            )
        return None

    def stop(self) -> None:
        """End every subrequest: tell the server, then break the connections."""
        with self._lock:
            self._is_over = True
        for subrequest in self._subrequests:
            try:
                self._http.request_once("DELETE", f"{REQUESTS_PATH}/{subrequest.descriptor.request_id}")
            except UnansweredError:
                break  # it would not answer for the others either
            except ObjectCacheError:
                continue
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.abort()

    def _read_subrequest(self, subrequest: Subrequest) -> None:
        stream: Stream | None = None
        try:
            stream = self._opened(subrequest.descriptor)
            with self._lock:
                self._streams.append(stream)
                is_over = self._is_over
            if not is_over:
                self._read(subrequest, stream)
        except Exception as error:
            self._on_failure(subrequest, error)
        finally:
            if stream is not None:
                stream.close()

    def _opened(self, descriptor: Descriptor) -> Stream:
        """The answer; to a descriptor for exact chunks where the server knows no others."""
        body, path = encode_binary(descriptor), f"/{self._fetch.bucket}"
        try:
            return self._http.stream("POST", path, {"layerwise": ""}, body, self._timeout_s)
        except ObjectCacheError as error:
            if not is_too_new(descriptor, error):
                raise
        body = encode_binary(descriptor.exact)
        return self._http.stream("POST", path, {"layerwise": ""}, body, self._timeout_s)

    def _read(self, subrequest: Subrequest, stream: Stream) -> None:
        began_s = time.monotonic()
        mode, chunk_count = payload_shape(stream.headers)
        if len(self._subrequests) == 1:
            self._chunk_count = chunk_count
        elif chunk_count != subrequest.descriptor.chunk_count:
            self._on_short(subrequest, subrequest.first_chunk + chunk_count)
            return
        packed = self._packed(subrequest, stream.headers, chunk_count)
        self._on_admitted(mode, granted_rate(stream.headers))
        layout = self._fetch.descriptor.layout
        view = self._fetch.place.host_view()
        if packed is not None:
            self._read_encoded(subrequest, stream, mode, packed)
        elif mode is Mode.LAYER_MAJOR:
            layer_bytes, nbytes = layout.layer_bytes(self._chunk_count), layout.layer_bytes(chunk_count)
            first = layout.layer_bytes(subrequest.first_chunk)
            for layer_index in range(layout.num_layers):
                start = layer_index * layer_bytes + first
                stream.read_into(view[start : start + nbytes])
                self._on_layer(layer_index)
        else:
            place = self._fetch.place
            for start, end in place.chunk_runs(subrequest.first_chunk, chunk_count, layout.chunk_bytes):
                stream.read_into(view[start:end])
        with self._lock:
            self._ended = mode, stream.headers, time.monotonic() - began_s

    def _whole_forms(self) -> LayerForms | None:
        """The forms of all chunks, which the subrequests have brought; None where they are exact."""
        if not self._forms:
            return None
        each = [self._forms[subrequest.first_chunk] for subrequest in self._subrequests]
        counts = [forms.chunk_count for forms in each]
        mean = sum(forms.mean_error * count for forms, count in zip(each, counts, strict=True)) / sum(counts)
        runs = tuple(run for forms in each for run in forms.runs)
        loss, basis = greatest_loss(each)
        return LayerForms(runs, max(forms.worst_error for forms in each), mean, loss, basis)

    def _packed(self, subrequest: Subrequest, headers: Mapping[str, str], chunk_count: int) -> Packed | None:
        """How the body is encoded; None where all of it is exact."""
        forms, descriptor = forms_in(headers), self._fetch.descriptor
        if forms is None or descriptor.accept is None:
            return None
        forms = checked_forms(forms, chunk_count, descriptor=descriptor)
        with self._lock:
            self._forms[subrequest.first_chunk] = forms
        if forms.is_exact:
            return None
        return Packed(forms, layer_shape(descriptor.layout, descriptor.accept))

    def _read_encoded(self, subrequest: Subrequest, stream: Stream, mode: Mode, packed: Packed) -> None:
        """Read a layer, or in chunk-major mode a chunk, and decode it before more is read: what comes faster than it is
        decoded waits in the connection.
        """
        layout, first_chunk = self._fetch.descriptor.layout, subrequest.first_chunk
        places, sizes = host_bytes(self._fetch.place.host_view()), packed.forms.layer_bytes
        if mode is Mode.LAYER_MAJOR:
            layer_bytes, first = layout.layer_bytes(self._chunk_count), layout.layer_bytes(first_chunk)
            body = np.empty(int(sizes.sum()), dtype=np.uint8)
            end = first + layout.layer_bytes(packed.forms.chunk_count)
            for layer_index in range(layout.num_layers):
                stream.read_into(body.data)
                start = layer_index * layer_bytes
                kept = packed.place(body, places[start + first : start + end], layer_index, first_chunk)
                if kept is not None:
                    self._fetch.on_kept(layer_index, first_chunk, kept)
                self._on_layer(layer_index)
            return
        for index, nbytes in enumerate(sizes.tolist()):
            body = np.empty(layout.num_layers * nbytes, dtype=np.uint8)
            stream.read_into(body.data)
            start = layout.delivery_bytes(first_chunk + index)
            chunk = packed.chunk(index, layout.num_layers)
            kept = chunk.place_chunk(body, places[start : start + layout.chunk_bytes], first_chunk + index)
            for layer_index in range(0 if kept is None else layout.num_layers):
                assert kept is not None
                self._fetch.on_kept(layer_index, first_chunk + index, kept[layer_index : layer_index + 1])

    def _on_admitted(self, mode: Mode, granted: Grant) -> None:
        """A subrequest was admitted. The fetch is admitted with the last of them: no layer is whole before."""
        with self._lock:
            self._grants.append(granted)
            if len(self._grants) == len(self._subrequests):
                rate = sum(each.rate_bytes_per_s for each in self._grants)
                forms = self._whole_forms() if len(self._forms) == len(self._subrequests) else None
                self._fetch.on_start(mode, self._chunk_count, Grant(rate, self._grants[0].epoch), forms)

    def _on_layer(self, layer_index: int) -> None:
        with self._lock:
            self._missing_counts[layer_index] -= 1
            if not self._missing_counts[layer_index]:
                self._fetch.on_layer(layer_index)

    def _on_failure(self, subrequest: Subrequest, error: Exception) -> None:
        if isinstance(error, ChunkUnavailable) and subrequest.first_chunk:
            is_prefix = subrequest.descriptor.on_missing is OnMissing.PREFIX and error.layer is None
            if is_prefix and error.code is not ErrorCode.CHUNK_CORRUPT:
                self._on_short(subrequest, subrequest.first_chunk + (error.index or 0))
                return
            index = subrequest.first_chunk + (error.index or 0)
            error = ChunkUnavailable(error.code, error.message, field=error.field, index=index, layer=error.layer)
        with self._lock:
            if not self._is_over:
                self._failures.append((subrequest.first_chunk, error))
        self._end_others(subrequest)

    def _on_short(self, subrequest: Subrequest, chunk_count: int) -> None:
        """Only `chunk_count` chunks are stored: the others have placed their bytes as if there were more."""
        with self._lock:
            self._stored_count = min(
                chunk_count, self._chunk_count if self._stored_count is None else self._stored_count
            )
        self._end_others(subrequest)

    def _end_others(self, subrequest: Subrequest) -> None:
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        if is_first and len(self._subrequests) > 1:
            self.stop()
