"""Decoding a layer of many chunks into its places: S bytes for each chunk, one after the other.

A layer comes packed, or each chunk's bytes lie at the beginning of its place already. Its chunks are told by runs: the
codec's name, how many chunks, and the bytes that each takes. The name "exact" stands for bytes that stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kv_codecs.elements import Bytes
from kv_codecs.encoding import WrongLayerError, decode_many
from kv_codecs.layer import Codec, LayerShape

Run = tuple[str, int, int]
"""The codec's name, chunks, and the bytes of a layer of each."""


class WrongChunkError(WrongLayerError):
    """An encoded layer is damaged, or not the announced one: that of the chunk `index` among those of the call."""

    def __init__(self, index: int) -> None:
        super().__init__(f"the encoded layer of chunk {index} is damaged, or not the one that was announced")
        self.index = index


def decode_packed(packed: Bytes, runs: Sequence[Run], shape: LayerShape, places: Bytes) -> None:
    """Decode a layer whose chunks lie one after the other in `packed` into `places`. Raises WrongChunkError; places
    before its chunk are written then, later ones are not.
    """
    start = first = 0
    for name, count, nbytes in runs:
        if name == Codec.EXACT.value:
            places[first * shape.nbytes : (first + count) * shape.nbytes] = packed[start : start + count * nbytes]
        else:
            steps = np.arange(count)
            rows = np.stack([start + steps * nbytes, (first + steps) * shape.nbytes], axis=1)
            bad = decode_many(packed, rows, Codec(name), shape, places)
            if bad >= 0:
                raise WrongChunkError(first + bad)
        start, first = start + count * nbytes, first + count


def decode_places(places: Bytes, runs: Sequence[Run], shape: LayerShape) -> None:
    """Decode a layer whose chunks lie at the beginning of their places. Raises WrongChunkError."""
    first = 0
    for name, count, _ in runs:
        if name != Codec.EXACT.value:
            starts = (first + np.arange(count)) * shape.nbytes
            rows = np.stack([starts, starts], axis=1)
            bad = decode_many(places, rows, Codec(name), shape, places, is_in_place=True)
            if bad >= 0:
                raise WrongChunkError(first + bad)
        first += count


def decode_chunks(places: Bytes, runs: Sequence[Run], shape: LayerShape, num_layers: int) -> None:
    """Decode chunks, each with all its layers: the encoded ones lie one after the other at the beginning of the chunk's
    place, which has `num_layers` * S bytes. Raises WrongChunkError.
    """
    first, place_bytes = 0, num_layers * shape.nbytes
    for name, count, nbytes in runs:
        for index in range(first, first + count if name != Codec.EXACT.value else first):
            place = places[index * place_bytes : (index + 1) * place_bytes]
            try:
                decode_packed(place[: num_layers * nbytes].copy(), [(name, num_layers, nbytes)], shape, place)
            except WrongChunkError:
                raise WrongChunkError(index) from None
        first += count
