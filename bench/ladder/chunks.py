"""Chunks of the Llama-3.1-8B shape in a server, for the figures that fetch prefixes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.content import Bytes, Content, VerificationError, make_content, verify_payload
from bench.progress import progress_bar
from bench.server import BenchServer
from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout
from descriptors.prefix_keys import Namespace, chunk_keys
from descriptors.units import MIB
from nixl_client.client import ObjectCacheClient, Transport

TOKEN_BYTES = 4096
"""A token's KV in one layer: 2 * 8 heads * 128 * 2 bytes."""
FILL_BATCH_BYTES = 64 * MIB
FETCH_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt's chunks under one chunk size: their keys, and what is in them."""

    keys: tuple[str, ...]
    content: Content

    @property
    def layout(self) -> ChunkLayout:
        """L, G and S."""
        return self.content.layout

    @property
    def payload_bytes(self) -> int:
        """All of it."""
        return self.layout.payload_bytes(len(self.keys))


def make_prefix(num_layers: int, chunk_tokens: int, token_count: int, seed: int) -> Prefix:
    """Seeded chunks of a prompt of `token_count` tokens."""
    layout = ChunkLayout(num_layers, chunk_tokens, TOKEN_BYTES * chunk_tokens)
    tokens = np.random.default_rng(seed).integers(0, 1 << 32, token_count, dtype=np.uint32)
    namespace = Namespace(model="bench-ladder", dtype="uint8", block_tokens=chunk_tokens)
    keys = chunk_keys(namespace.text(), tokens, chunk_tokens)
    return Prefix(tuple(keys), make_content(len(keys), layout, seed))


def store_prefix(server: BenchServer, prefix: Prefix, title: str) -> None:
    """Put every chunk; only a batch of them exists here at a time."""
    batch = max(1, FILL_BATCH_BYTES // prefix.layout.chunk_bytes)
    with server.client(Transport.HTTP) as client, progress_bar(len(prefix.keys), title) as advance:
        for first in range(0, len(prefix.keys), batch):
            some = prefix.keys[first : first + batch]
            client.put_chunks(some, [prefix.content.chunk(first + index) for index in range(len(some))])
            advance(len(some))


def fetcher(client: ObjectCacheClient, prefix: Prefix, buffer: Bytes, delivery: Delivery) -> Callable[[], float]:
    """One request for the whole prefix; every byte is compared after the clock has stopped."""
    target = buffer[: prefix.payload_bytes]

    def run() -> float:
        target.fill(0)
        started_s = time.monotonic()
        with client.fetch(prefix.keys, prefix.layout, buffer, delivery=delivery) as fetch:
            result = fetch.wait(FETCH_TIMEOUT_S)
            duration_s = time.monotonic() - started_s
        if result.mode.value != delivery.value or result.transferred_bytes != target.nbytes:
            raise VerificationError(f"{result} came of {delivery.value}, {target.nbytes} bytes")
        verify_payload(target, prefix.content, delivery)
        return duration_s

    return run
