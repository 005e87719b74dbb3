"""Names in the HTTP requests and answers between clients, gateways and storage servers: headers, and the paths below
`/_objectcache`. docs/reference/protocol.md explains them. (Headers with a form of their own are in the modules that
read and write them: `tracing`, `rdma_token`, `peer_auth`, `peer_calls`.)
"""

from __future__ import annotations

DESCRIPTOR_HEADER = "x-amz-objectcache-descriptor"
"""A small descriptor, base64url, with a GET instead of a body."""
MODE_HEADER = "x-amz-objectcache-mode"
CHUNKS_HEADER = "x-amz-objectcache-chunks"
"""k: how many chunks the answer brings."""
RATE_HEADER = "x-amz-objectcache-rate"
"""Bytes/s that the link gives the delivery."""
EPOCH_HEADER = "x-amz-objectcache-epoch"
FORMS_HEADER = "x-amz-objectcache-forms"
"""The codec of each chunk, and the bytes of its layers, where the caller accepts encoded ones
(`descriptors.layer_forms`).
"""
CACHE_HEADER = "x-amz-objectcache-cache"
"""With CreateBucket, and in answers to HeadBucket: the bucket is a cache, of so many bytes (`200GB`), or `auto`."""
CHUNK_HEADER = "x-amz-objectcache-chunk"
"""`true` with a PUT: the object is a chunk, and immutable, whatever its key looks like."""
PREFIX_HEADER = "x-amz-objectcache-prefix"
"""`true` with a PUT: the chunk is of a prefix that many prompts share, and leaves a bounded cache late."""
CLASS_HEADER = "x-amz-objectcache-class"
"""The kind of content, with a PUT: `code`, `chat`. How much a codec costs in quality depends on it."""
LAYOUT_HEADER = "x-amz-objectcache-layout"
"""The layout of the KV in a chunk, with a PUT (`descriptors.kv_forms`). Only chunks that have one are ever replaced by
encoded ones.
"""
CODEC_HEADER = "x-amz-objectcache-codec"
"""The form of a chunk that the server has encoded, in answers (`descriptors.kv_forms`)."""
DECODE_HEADER = "x-amz-objectcache-decode"
"""`true` with a plain GET: an encoded chunk is to come decoded."""
RDMA_REPLY_HEADER = "x-amz-rdma-reply"
RDMA_BYTES_HEADER = "x-amz-rdma-bytes-transferred"
WRITERS_HEADER = "x-amz-objectcache-writers"
"""Ids of storage servers of a cluster that know a client's memory, and must answer before it is the client's again."""
UNSETTLED_HEADER = "x-amz-objectcache-unsettled"
"""Ids of storage servers that were given up and may still write bytes of a delivery."""

SERVICE_PREFIX = "_objectcache"
"""In place of a bucket: what is below it is no object."""
AGENTS_PATH = f"/{SERVICE_PREFIX}/agents"
REQUESTS_PATH = f"/{SERVICE_PREFIX}/requests"
HEALTH_NAME = "health"
HEALTH_PATH = f"/{SERVICE_PREFIX}/{HEALTH_NAME}"
STATUS_PATH = f"/{SERVICE_PREFIX}/status"
TRANSPORTS_PATH = f"/{SERVICE_PREFIX}/transports"
LOADED_HEADER = "x-objectcache-loaded-tokens"
"""In answers of llama.cpp's server behind `objectcache llama-cpp`: tokens of the prompt that came from the store."""
