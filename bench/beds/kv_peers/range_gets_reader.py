"""A native S3 client that asks for one slice at a time: `python -m bench.beds.kv_peers.range_gets_reader WORK`.

obstore (Rust), called from one thread for each request in flight: of the native clients it takes the least processor
time for a request. Slices are asked for in the order a layer-major payload has them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import numpy as np
import obstore

from bench.beds.kv_peers.work import Capability, Run, Work, sampled, serve, verify_first_layers
from bench.beds.memory import huge_page_memory
from bench.beds.s3_load import open_store

IN_FLIGHT = 32


def start(work: Work) -> Sequence[tuple[Capability, Run]]:
    """Connect; the chunks are stored already."""
    assert work.s3 is not None
    store = open_store(work.s3)
    content = work.content()
    layer_count = work.sampled_layers
    slice_bytes, chunk_count = work.layout.per_layer_chunk_bytes, len(work.keys)
    slice_count = layer_count * chunk_count
    buffer = huge_page_memory(slice_count * slice_bytes)
    slices = buffer.reshape(slice_count, slice_bytes)
    pool = ThreadPoolExecutor(IN_FLIGHT)

    def run() -> tuple[float, float | None]:
        buffer.fill(0)
        numbers, first_layer_s = count(), list[float]()

        def get_slices(_: int) -> None:
            while (number := next(numbers)) < slice_count:
                layer, chunk = divmod(number, chunk_count)
                body = obstore.get_range(store, work.keys[chunk], start=layer * slice_bytes, length=slice_bytes)
                slices[number] = np.frombuffer(memoryview(body), dtype=np.uint8)
                if layer == 0:
                    first_layer_s.append(time.monotonic() - started_s)

        started_s = time.monotonic()
        list(pool.map(get_slices, range(IN_FLIGHT)))
        duration_s = time.monotonic() - started_s
        verify_first_layers(buffer, content, layer_count)
        return duration_s, max(first_layer_s)

    note = f"obstore, {IN_FLIGHT} in flight, {sampled(work)}"
    return [(Capability("native_range_gets", buffer.nbytes, note), run)]


if __name__ == "__main__":
    serve(start, sys.argv[1])
