"""What all measurements of a calibration share: chunks in a server, a client for each transport, checked fetches."""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack

import numpy as np

from adapters.nixl_agent import NixlFailure
from bench.aggregate_bed import Chunks
from bench.calibration.points import Family
from bench.content import STAMP_BYTES, Bytes, Content, VerificationError, make_content, verify_payload
from bench.progress import progress_bar
from bench.samples import State
from bench.server import BenchServer
from descriptors.descriptor import Delivery
from descriptors.errors import ObjectCacheError
from descriptors.layout import ChunkLayout
from descriptors.prefix_keys import Namespace, chunk_keys
from descriptors.units import MIB
from nixl_client.client import ObjectCacheClient, Transport
from nixl_client.fetch import LayerFetch
from nixl_client.shm_link import ShmUnavailableError
from storage_server.settings import StorageSettings

FETCH_TIMEOUT_S = 300.0
FILL_BATCH_BYTES = 64 * MIB


def state_of_warm(stored_bytes: int, storage: StorageSettings) -> State:
    """Where chunks that are asked for again are found: the DRAM tier, where it is large enough for all of these."""
    return State.DRAM if storage.dram_bytes >= stored_bytes * 9 // 8 else State.PAGE_CACHE


def chunks_of(family: Family, seed: int) -> Chunks:
    """The longest prefix of a family."""
    return make_chunks(family.counts[-1], family.layout, seed)


def make_chunks(count: int, layout: ChunkLayout, seed: int) -> Chunks:
    """Content and keys of one seed."""
    tokens = np.random.default_rng(seed).integers(0, 1 << 32, count * layout.chunk_tokens, dtype=np.uint32)
    namespace = Namespace(model=f"calibrate {seed}", dtype="uint8", block_tokens=layout.chunk_tokens)
    return Chunks(chunk_keys(namespace.text(), tokens, layout.chunk_tokens), make_content(count, layout, seed))


def part(chunks: Chunks, first: int, count: int) -> Chunks:
    """Some of the chunks, in their order."""
    whole = chunks.content
    base, stamps = whole.base[:, first * STAMP_BYTES :], whole.stamps[:, first : first + count]
    return Chunks(chunks.keys[first : first + count], Content(whole.layout, count, base, stamps))


def fill(server: BenchServer, chunks: Chunks) -> None:
    """Store them."""
    keys, content = chunks.keys, chunks.content
    batch = max(1, FILL_BATCH_BYTES // content.layout.chunk_bytes)
    with server.client(Transport.HTTP) as client, progress_bar(len(keys), "storing chunks") as advance:
        for first in range(0, len(keys), batch):
            some = keys[first : first + batch]
            client.put_chunks(some, [content.chunk(first + index) for index in range(len(some))])
            advance(len(some))


def clients(
    server: BenchServer,
    transports: Sequence[Transport],
    buffer: Bytes,
    missing: MutableMapping[str, str],
    stack: ExitStack,
) -> Iterator[tuple[Transport, ObjectCacheClient]]:
    """Those that can run here, with the buffer registered; `missing` is told why the others cannot."""
    for transport in transports:
        client = stack.enter_context(server.client(transport))
        try:
            client.register_buffer(buffer)
        except (ImportError, NixlFailure, ShmUnavailableError, ObjectCacheError) as error:
            missing[transport.value] = str(error)
            continue
        yield transport, client


def fetch_checked(
    client: ObjectCacheClient, transport: Transport, chunks: Chunks, buffer: Bytes, delivery: Delivery
) -> tuple[float, ...]:
    """Fetch into the buffer's beginning: when each layer was there, in seconds since the request.

    Raises VerificationError, and what the client raises.
    """
    return fetch_together(client, transport, [chunks], buffer, delivery)[0]


def fetch_together(
    client: ObjectCacheClient, transport: Transport, prefixes: Sequence[Chunks], buffer: Bytes, delivery: Delivery
) -> list[tuple[float, ...]]:
    """The same for several at once, one behind the other in the buffer; in seconds since the first was asked for."""
    sizes = [chunks.payload_bytes for chunks in prefixes]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    buffer[: sum(sizes)].fill(0)
    with ExitStack() as stack:
        started_s = time.monotonic()
        fetches = [
            stack.enter_context(
                client.fetch(chunks.keys, chunks.content.layout, buffer, offset=start, delivery=delivery)
            )
            for chunks, start in zip(prefixes, starts, strict=True)
        ]
        times = [_ready_s(fetch, transport, delivery, started_s) for fetch in fetches]
    for chunks, start in zip(prefixes, starts, strict=True):
        verify_payload(buffer[start : start + chunks.payload_bytes], chunks.content, delivery)
    return times


def _ready_s(fetch: LayerFetch, transport: Transport, delivery: Delivery, started_s: float) -> tuple[float, ...]:
    result = fetch.wait(FETCH_TIMEOUT_S)
    if result.mode.value != delivery.value or fetch.transport is not transport:
        raise VerificationError(f"{result} over {fetch.transport} came of {delivery.value} over {transport}")
    layer_count = fetch.descriptor.num_layers
    return tuple(fetch.wait_layer(index).ready_at_s - started_s for index in range(layer_count))
