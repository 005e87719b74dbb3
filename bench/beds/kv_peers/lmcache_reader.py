"""LMCache's S3 connector: `python -m bench.beds.kv_peers.lmcache_reader WORK`, in an environment with LMCache.

It stores and fetches whole chunks, addresses the bucket by Host name alone, and asks for an object's size before its
first GET (here in the round that is not counted). Layer by layer it cannot: it refuses to store anything but a full
chunk. Its settings are the defaults of LMCache's adapter but for TLS.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.storage_backend.connector.s3_connector import S3Connector

from bench.beds.kv_peers.lmcache import Loop, backend_of, bytes_of
from bench.beds.kv_peers.work import Capability, Run, S3Target, Work, serve
from objectcache.calibration.content import VerificationError

IO_THREADS = 64
SPARE_BYTES = 128 << 20


def start(work: Work) -> Sequence[tuple[Capability, Run]]:
    """Start the connector and store the chunks through it."""
    assert work.s3 is not None
    loop = Loop()
    connector, wait = _connector(work, work.s3, loop), loop.wait
    keys = [CacheEngineKey("bench", 1, 0, number + 1, torch.float16) for number in range(len(work.keys))]
    content = work.content()
    backend = connector.local_cpu_backend
    for index, key in enumerate(keys):
        chunk = backend.allocate(connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt)
        bytes_of(chunk)[:] = content.chunk(index)
        wait(connector.put(key, chunk))
        chunk.ref_count_down()
    if not connector.exists_sync(keys[-1]):
        raise RuntimeError("the chunks could not be stored")

    def run() -> tuple[float, float | None]:
        started_s = time.monotonic()
        chunks = wait(connector.batched_get(keys))
        duration_s = time.monotonic() - started_s
        for index, chunk in enumerate(chunks):
            if chunk is None:
                raise RuntimeError(f"chunk {index} could not be loaded")
            if not np.array_equal(bytes_of(chunk), content.chunk(index)):
                raise VerificationError(f"chunk {index}: wrong bytes")
            bytes_of(chunk).fill(0)
            chunk.ref_count_down()
        return duration_s, None

    note = f"LMCache S3Connector.batched_get, {IO_THREADS} threads, whole chunks"
    return [(Capability("lmcache_s3", work.payload_bytes, note), run)]


def _connector(work: Work, s3: S3Target, loop: Loop) -> S3Connector:
    head_dim, odd = divmod(work.layout.per_layer_chunk_bytes, 4 * work.layout.chunk_tokens)
    if odd:
        raise ValueError(f"S must be a multiple of {4 * work.layout.chunk_tokens} bytes for LMCache")
    memory_bytes = work.payload_bytes + SPARE_BYTES
    _, backend = backend_of(work.layout.chunk_tokens, work.layout.num_layers, head_dim, memory_bytes)
    os.environ.update(s3.proxy())
    return S3Connector(
        f"s3://{s3.address}",
        loop=loop.loop,
        local_cpu_backend=backend,
        s3_num_io_threads=IO_THREADS,
        s3_prefer_http2=False,
        s3_region=s3.region,
        s3_enable_s3express=False,
        disable_tls=True,
        aws_access_key_id=s3.access_key,
        aws_secret_access_key=s3.secret_key,
    )


if __name__ == "__main__":
    serve(start, sys.argv[1])
    sys.stderr.flush()
    os._exit(0)
