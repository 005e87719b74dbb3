"""Fetches over http: the payload is the answer's body, read layer by layer into the buffer by one of our threads."""

from __future__ import annotations

import contextlib
import logging
import time

from descriptors.descriptor_codec import encode_binary
from descriptors.errors import ErrorCode, ObjectCacheError, ServerError
from descriptors.notices import Mode
from nixl_client.answers import grant, payload_shape
from nixl_client.fetch import LayerFetch
from nixl_client.http import SignedHttp, Stream

_log = logging.getLogger(__name__)


class HttpFetches:
    """Runs fetches over http."""

    def __init__(self, http: SignedHttp) -> None:
        self._http = http
        self._streams: dict[str, Stream] = {}

    def run(self, fetch: LayerFetch) -> None:
        """POST the descriptor and read the body; returns when the fetch is settled."""
        stream: Stream | None = None
        try:
            body = encode_binary(fetch.descriptor)
            stream = self._http.stream("POST", f"/{fetch.bucket}", {"layerwise": ""}, body, fetch.timeout_s)
            self._streams[fetch.request_id] = stream
            self._read(fetch, stream)
        except ObjectCacheError as error:
            fetch.on_failure(error)
        except Exception as error:
            _log.exception("fetch %s", fetch.request_id)
            fetch.on_failure(ServerError(ErrorCode.INTERNAL_ERROR, f"the client failed: {error}"))
        finally:
            self._streams.pop(fetch.request_id, None)
            if stream is not None:
                stream.close()
            fetch.settle()

    def cancel(self, fetch: LayerFetch) -> None:
        """Only our own thread writes into the buffer; it ends with its connection."""
        with contextlib.suppress(ObjectCacheError):
            self._http.request("DELETE", f"/_objectcache/requests/{fetch.request_id}")
        stream = self._streams.get(fetch.request_id)
        if stream is not None:
            stream.abort()
        fetch.wait_settled()

    def _read(self, fetch: LayerFetch, stream: Stream) -> None:
        began_s = time.monotonic()
        mode, chunk_count = payload_shape(stream.headers)
        fetch.on_start(mode, chunk_count, grant(stream.headers))
        layout = fetch.descriptor.layout
        view = fetch.host_view()
        if mode is Mode.LAYER_MAJOR:
            nbytes = layout.layer_bytes(chunk_count)
            for layer_index in range(layout.num_layers):
                stream.read_into(view[layer_index * nbytes : (layer_index + 1) * nbytes])
                fetch.on_layer(layer_index)
        else:
            stream.read_into(view[: layout.payload_bytes(chunk_count)])
        body_s = time.monotonic() - began_s
        fetch.on_answer(mode, chunk_count, layout.payload_bytes(chunk_count), stream.headers, body_s)
