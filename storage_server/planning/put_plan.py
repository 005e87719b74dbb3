"""Spans of a client's buffer from which each object of a put is read. Pure arithmetic.

This is the inverse of `plan`: chunk i of N is one run of L*S bytes in a chunk-major buffer, and L runs of S bytes, N*S
apart, in a layer-major one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from descriptors.layout import ChunkLayout
from descriptors.notices import Mode


@dataclass(frozen=True, slots=True)
class Span:
    """`nbytes` bytes from `offset` of a request's target."""

    offset: int
    nbytes: int


SpansOf = Callable[[int, int], Sequence[Span]]
"""Maps (start, nbytes) of an object to the spans of the target that hold those bytes, in order."""


def one_run(start: int, nbytes: int) -> Sequence[Span]:
    """The one span of an object that lies in the target unchanged."""
    return (Span(start, nbytes),)


def chunk_spans(mode: Mode, layout: ChunkLayout, chunk_count: int, chunk_index: int) -> SpansOf:
    """The function that gives the spans of chunk `chunk_index` among `chunk_count`."""
    if mode is Mode.CHUNK_MAJOR:
        first = chunk_index * layout.chunk_bytes
        return lambda start, nbytes: (Span(first + start, nbytes),)
    slice_bytes, layer_bytes = layout.per_layer_chunk_bytes, layout.layer_bytes(chunk_count)

    def spans(start: int, nbytes: int) -> Sequence[Span]:
        found = []
        end = start + nbytes
        while start < end:
            layer_index, within = divmod(start, slice_bytes)
            count = min(slice_bytes - within, end - start)
            found.append(Span(layer_index * layer_bytes + chunk_index * slice_bytes + within, count))
            start += count
        return found

    return spans
