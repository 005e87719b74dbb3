"""Decoding a layer of many chunks into its places: S bytes for each chunk, one after the other.

A layer comes packed, or each chunk's bytes lie at the beginning of its place already. Its chunks are told by runs: the
codec's name, how many chunks, and the bytes that each takes. The name "exact" stands for bytes that stay as they are.

Where some chunks have fewer tokens than they had, the calls return which are there; None where all are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from objectcache.kv_codecs.dropping import Kept
from objectcache.kv_codecs.elements import Bytes
from objectcache.kv_codecs.encoding import Numbers, WrongLayerError, decode_dropped, decode_many
from objectcache.kv_codecs.layer import Codec, LayerShape

Run = tuple[str, int, int]
"""The codec's name, chunks, and the bytes of a layer of each."""


class WrongChunkError(WrongLayerError):
    """An encoded layer is damaged, or not the announced one: that of the chunk `index` among those of the call."""

    def __init__(self, index: int) -> None:
        super().__init__(f"the encoded layer of chunk {index} is damaged, or not the one that was announced")
        self.index = index


def decode_packed(packed: Bytes, runs: Sequence[Run], shape: LayerShape, places: Bytes) -> Kept | None:
    """Decode a layer whose chunks lie one after the other in `packed` into `places`. Raises WrongChunkError; places
    before its chunk are written then, later ones are not. Returns of shape (chunks, tokens).
    """
    start = first = 0
    kept = kept_of(runs, shape)
    for name, count, nbytes in runs:
        if name == Codec.EXACT.value:
            places[first * shape.nbytes : (first + count) * shape.nbytes] = packed[start : start + count * nbytes]
        else:
            steps = np.arange(count)
            rows = np.stack([start + steps * nbytes, (first + steps) * shape.nbytes], axis=1)
            _decode_run(
                packed, rows, codec=Codec(name), shape=shape, places=places, kept=kept, first=first, is_in_place=False
            )
        start, first = start + count * nbytes, first + count
    return kept


def decode_places(places: Bytes, runs: Sequence[Run], shape: LayerShape) -> Kept | None:
    """Decode a layer whose chunks lie at the beginning of their places. Raises WrongChunkError. Returns of shape
    (chunks, tokens).
    """
    first = 0
    kept = kept_of(runs, shape)
    for name, count, _ in runs:
        if name != Codec.EXACT.value:
            starts = (first + np.arange(count)) * shape.nbytes
            rows = np.stack([starts, starts], axis=1)
            _decode_run(
                places, rows, codec=Codec(name), shape=shape, places=places, kept=kept, first=first, is_in_place=True
            )
        first += count
    return kept


def decode_chunks(places: Bytes, runs: Sequence[Run], shape: LayerShape, num_layers: int) -> Kept | None:
    """Decode chunks, each with all its layers: the encoded ones lie one after the other at the beginning of the chunk's
    place, which has `num_layers` * S bytes. Raises WrongChunkError. Returns of shape (chunks, layers, tokens).
    """
    first, place_bytes = 0, num_layers * shape.nbytes
    whole = kept_of(runs, shape)
    kept = None if whole is None else np.repeat(whole[:, None], num_layers, axis=1)
    for name, count, nbytes in runs:
        for index in range(first, first + count if name != Codec.EXACT.value else first):
            place = places[index * place_bytes : (index + 1) * place_bytes]
            try:
                mine = decode_packed(place[: num_layers * nbytes].copy(), [(name, num_layers, nbytes)], shape, place)
            except WrongChunkError:
                raise WrongChunkError(index) from None
            if kept is not None and mine is not None:
                kept[index] = mine
        first += count
    return kept


def kept_of(runs: Sequence[Run], shape: LayerShape) -> Kept | None:
    """All tokens of all chunks, of shape (chunks, tokens), where one of the codecs drops some; else None."""
    if not any(Codec(name).drops_tokens for name, _, _ in runs):
        return None
    return np.ones((sum(count for _, count, _ in runs), shape.tokens), dtype=np.bool_)


def _decode_run(
    source: Bytes,
    rows: Numbers,
    codec: Codec,
    shape: LayerShape,
    places: Bytes,
    kept: Kept | None,
    first: int,
    *,
    is_in_place: bool,
) -> None:
    """Decode chunks of one codec, whose first is number `first` of the layer. Raises WrongChunkError."""
    if kept is not None and codec.drops_tokens:
        mine = kept[first : first + len(rows)]
        bad = decode_dropped(source, rows, codec=codec, shape=shape, out=places, kept=mine, is_in_place=is_in_place)
    else:
        bad = decode_many(source, rows, codec, shape, places, is_in_place=is_in_place)
    if bad >= 0:
        raise WrongChunkError(first + bad)
