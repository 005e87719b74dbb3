"""Seeded chunks that cannot be mistaken for one another, and the check that a payload holds exactly them. Pure.

Slice (chunk i, layer l) is a window of S bytes at 16*i of a random row of its own for every layer, so any stretch of
a few bytes tells chunks and layers apart; its first 16 bytes are a stamp of seed, chunk and layer. Windows overlap, so
expected bytes are views and never cost a second payload of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from descriptors.descriptor import Delivery
from descriptors.layout import ChunkLayout

STAMP_BYTES = 16
COMPARE_BYTES_MAX = 8 << 20
Bytes = NDArray[np.uint8]


class VerificationError(Exception):
    """A payload holds other bytes than were stored; the message names the first wrong slice."""


@dataclass(frozen=True, slots=True)
class Content:
    """`base` is uint8 of shape (L, S + 16*(N-1)), `stamps` uint8 of shape (L, N, 16)."""

    layout: ChunkLayout
    chunk_count: int
    base: Bytes
    stamps: Bytes

    def chunk(self, chunk_index: int) -> Bytes:
        """A whole chunk object: L*S bytes, layer after layer."""
        start = chunk_index * STAMP_BYTES
        slices = self.base[:, start : start + self.layout.per_layer_chunk_bytes].copy()
        slices[:, :STAMP_BYTES] = self.stamps[:, chunk_index]
        return slices.reshape(-1)

    def windows(self, layer_index: int) -> Bytes:
        """A layer of every chunk before stamping: a read-only view of shape (N, S)."""
        row = self.base[layer_index]
        shape = (self.chunk_count, self.layout.per_layer_chunk_bytes)
        return np.lib.stride_tricks.as_strided(row, shape, (STAMP_BYTES, 1), writeable=False)


def make_content(chunk_count: int, layout: ChunkLayout, seed: int) -> Content:
    """The chunks of one seed. Raises ValueError when a slice has no room for its stamp."""
    if layout.per_layer_chunk_bytes < STAMP_BYTES:
        raise ValueError(f"a slice needs at least {STAMP_BYTES} bytes")
    row_bytes = layout.per_layer_chunk_bytes + STAMP_BYTES * (chunk_count - 1)
    base = np.random.default_rng(seed).integers(0, 256, (layout.num_layers, row_bytes), dtype=np.uint8)
    stamps = np.empty((layout.num_layers, chunk_count, 2), dtype="<u8")
    stamps[:, :, 0] = seed
    stamps[:, :, 1] = np.arange(layout.num_layers)[:, None] << 32 | np.arange(chunk_count)
    return Content(layout, chunk_count, base, stamps.view(np.uint8))


def verify_payload(payload: Bytes, content: Content, delivery: Delivery) -> None:
    """Compare every byte of a payload of all chunks. Raises VerificationError at the first wrong slice."""
    layout = content.layout
    if payload.nbytes != layout.delivery_bytes(content.chunk_count):
        raise VerificationError(f"{payload.nbytes} bytes, {layout.delivery_bytes(content.chunk_count)} expected")
    slice_bytes = layout.per_layer_chunk_bytes
    if delivery is Delivery.LAYER_MAJOR:
        layers = payload.reshape(layout.num_layers, content.chunk_count, slice_bytes)
    else:
        layers = payload.reshape(content.chunk_count, layout.num_layers, slice_bytes).transpose(1, 0, 2)
    for layer_index in range(layout.num_layers):
        verify_slices(layers[layer_index], content, layer_index)


def verify_slices(slices: Bytes, content: Content, layer_index: int) -> None:
    """Compare one layer of the first chunks, uint8 of shape (at most N, S), in blocks that stay in the cache."""
    windows = content.windows(layer_index)
    step = max(1, COMPARE_BYTES_MAX // content.layout.per_layer_chunk_bytes)
    for first in range(0, len(slices), step):
        block = slices[first : first + step]
        stamps = content.stamps[layer_index, first : first + len(block)]
        expected = windows[first : first + len(block)]
        same_stamps = np.array_equal(block[:, :STAMP_BYTES], stamps)
        if not same_stamps or not np.array_equal(block[:, STAMP_BYTES:], expected[:, STAMP_BYTES:]):
            wrong = (block[:, :STAMP_BYTES] != stamps).any(1) | (
                block[:, STAMP_BYTES:] != expected[:, STAMP_BYTES:]
            ).any(1)
            raise VerificationError(f"chunk {first + int(wrong.argmax())}, layer {layer_index}: wrong bytes")
