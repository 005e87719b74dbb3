"""Chunks of data the tests store and expect back."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np

from descriptors.layout import ChunkLayout
from descriptors.objects import BodyDigests

LAYOUT = ChunkLayout(num_layers=6, chunk_tokens=16, per_layer_chunk_bytes=20_000)
N = 9
"""The shape and chunk count most tests use: several payloads a layer at the small settings of `local`."""


def make_chunks(chunk_count: int, layout: ChunkLayout, seed: int = 1) -> tuple[list[str], np.ndarray]:
    """Distinct keys and chunk objects, uint8 of shape (chunk_count, L*S)."""
    rng = np.random.default_rng(seed)
    keys = [f"{seed:08x}{index:056x}" for index in range(chunk_count)]
    return keys, rng.integers(0, 256, (chunk_count, layout.chunk_bytes), dtype=np.uint8)


def layer_of(chunks: np.ndarray, layout: ChunkLayout, layer_index: int) -> np.ndarray:
    """The expected layer: uint8 of shape (chunk_count, S)."""
    return chunks.reshape(len(chunks), layout.num_layers, layout.per_layer_chunk_bytes)[:, layer_index]


class BytesBody:
    """A body in some pieces, as a gateway would pass it on."""

    def __init__(self, data: bytes, pieces: int = 3, digests: BodyDigests | None = None) -> None:
        self._data = data
        self._step = max(1, -(-len(data) // pieces))
        self._digests = digests or BodyDigests()

    @property
    def has_sha256(self) -> bool:
        return self._digests.sha256 is not None

    @property
    def is_held_back(self) -> bool:
        return False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._data), self._step):
            yield self._data[start : start + self._step]

    def digests(self) -> BodyDigests:
        return self._digests
