"""A native S3 client that asks for one slice at a time: `python -m bench.kv_peers.range_gets_reader WORK`.

obstore (Rust), called from one thread for each request in flight: of the native clients it takes the least processor
time for a request. Slices are asked for in the order a layer-major payload has them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import obstore
from obstore.store import S3Store

from bench.kv_peers.memory import huge_page_memory
from bench.kv_peers.serving import Run, serve
from bench.kv_peers.work import Capability, Work, verify_first_layers
from descriptors.descriptor import Delivery

IN_FLIGHT = 32
REQUEST_TIMEOUT = "300s"


def start(work: Work) -> Sequence[tuple[Capability, Run]]:
    """Connect; the chunks are stored already."""
    assert work.s3 is not None
    store = S3Store(
        work.s3.bucket,
        endpoint=work.s3.url,
        region=work.s3.region,
        access_key_id=work.s3.access_key,
        secret_access_key=work.s3.secret_key,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": REQUEST_TIMEOUT},
        retry_config={"max_retries": 0},
    )
    content = work.content()
    layer_count = work.layers_within(work.slices_max)
    slice_bytes, chunk_count = work.per_layer_chunk_bytes, len(work.keys)
    slice_count = layer_count * chunk_count
    buffer = huge_page_memory(slice_count * slice_bytes)
    slices = buffer.reshape(slice_count, slice_bytes)
    pool = ThreadPoolExecutor(IN_FLIGHT)

    def run() -> tuple[float, float | None]:
        buffer.fill(0)
        numbers, first_layer = count(), threading.Lock()
        left, first_layer_ended_s = chunk_count, 0.0

        def get_slices() -> None:
            nonlocal left, first_layer_ended_s
            while (number := next(numbers)) < slice_count:
                layer, chunk = divmod(number, chunk_count)
                body = obstore.get_range(store, work.keys[chunk], start=layer * slice_bytes, length=slice_bytes)
                slices[number] = np.frombuffer(memoryview(body), dtype=np.uint8)
                if layer == 0:
                    with first_layer:
                        left -= 1
                        if left == 0:
                            first_layer_ended_s = time.monotonic()

        started_s = time.monotonic()
        for done in [pool.submit(get_slices) for _ in range(IN_FLIGHT)]:
            done.result()
        duration_s = time.monotonic() - started_s
        verify_first_layers(buffer, content, layer_count)
        return duration_s, first_layer_ended_s - started_s

    total = work.num_layers * chunk_count
    sampled = "all" if slice_count == total else f"a sample of {slice_count} of"
    note = f"obstore, {IN_FLIGHT} in flight, {sampled} {total} slices"
    return [(Capability("native_range_gets", Delivery.LAYER_MAJOR, buffer.nbytes, note), run)]


if __name__ == "__main__":
    serve(start, sys.argv[1:])
