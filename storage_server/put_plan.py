"""Where in a client's buffer the bytes of each object to be stored lie. Pure arithmetic.

The inverse of `storage_server.gather.plan`: chunk i of N is one run of L*S bytes in a chunk-major buffer, and L runs of
S bytes, N*S apart, in a layer-major one.
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
"""(start, nbytes) of an object to where those bytes lie in the target, in order."""


def one_run(start: int, nbytes: int) -> Sequence[Span]:
    """The spans of an object that lies in the target as it is."""
    return (Span(start, nbytes),)


def chunk_spans(mode: Mode, layout: ChunkLayout, chunk_count: int, chunk_index: int) -> SpansOf:
    """The spans of one chunk among `chunk_count`."""
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
