"""Codecs that leave tokens out: a half or a quarter of a chunk's tokens is kept, exactly, and each says where it was.

    streaming   the first SINKS tokens and the most recent ones (StreamingLLM)
    keydiff     those whose keys are least like the mean key of the layer (KeyDiff); a key counts with all its heads

    payload: the kept tokens' places, uint32 each, ascending; their keys; their values

Both need keys and values alone, no attention. Decoded, a kept token lies in its place, and the others are zeros. A
model that attends to them as to any other token gives wrong answers, so a reader has to leave them out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from objectcache.kv_codecs.elements import Bytes, to_floats
from objectcache.kv_codecs.layer import STREAMING, Codec, LayerShape, kept_count

SINKS = 4
PLACE_BYTES = 4
BLOCK_ELEMENTS = 1 << 18
Places = npt.NDArray[np.int64]
Kept = npt.NDArray[np.bool_]
"""Which tokens are there: of shape (chunks, tokens)."""


def dropping_bytes(shape: LayerShape, codec: Codec) -> int:
    """The bytes of a payload."""
    return kept_count(codec, shape.tokens) * (PLACE_BYTES + 2 * _token_bytes(shape))


def dropping_encode(flat: Bytes, shape: LayerShape, codec: Codec) -> bytes:
    """The payload of S bytes."""
    places = chosen_places(flat, shape, codec)
    kept = flat.reshape(2, shape.tokens, _token_bytes(shape))[:, places]
    return places.astype("<u4").tobytes() + kept.tobytes()


def dropping_decode(payload: Bytes, places: Places, shape: LayerShape, out: Bytes) -> None:
    """Write S bytes; `places` are those of the payload."""
    kept = payload[len(places) * PLACE_BYTES :].reshape(2, len(places), _token_bytes(shape))
    tokens = out.reshape(2, shape.tokens, _token_bytes(shape))
    tokens[:] = 0
    tokens[:, places] = kept


def places_in(payload: Bytes, shape: LayerShape, codec: Codec) -> Places | None:
    """The places of the kept tokens; None where they cannot be."""
    count = kept_count(codec, shape.tokens)
    places = payload[: count * PLACE_BYTES].view("<u4").astype(np.int64)
    return places if places[-1] < shape.tokens and bool(np.all(np.diff(places) > 0)) else None


def chosen_places(flat: Bytes, shape: LayerShape, codec: Codec) -> Places:
    """The tokens of a layer that a codec keeps, ascending."""
    count = kept_count(codec, shape.tokens)
    if codec in STREAMING:
        return np.concatenate([np.arange(SINKS), np.arange(shape.tokens - count + SINKS, shape.tokens)])
    mean = sum((normal.sum(axis=0) for normal in _directions(flat, shape)), np.zeros(shape.width)) / shape.tokens
    likeness = np.concatenate([(normal * mean).sum(axis=1) for normal in _directions(flat, shape)])
    rounded = likeness.astype(np.float32)  # so that equal keys are equal
    return np.sort(np.argsort(rounded, kind="stable")[:count])


def _directions(flat: Bytes, shape: LayerShape) -> Iterator[npt.NDArray[np.float64]]:
    """The keys with a length of 1, a few tokens at a time: (tokens, width) each. A layer may have 128 MiB of keys, and
    is not held several times in a larger type.
    """
    token_bytes = _token_bytes(shape)
    step = max(1, BLOCK_ELEMENTS // shape.width)
    for first in range(0, shape.tokens, step):
        part = flat[first * token_bytes : min(first + step, shape.tokens) * token_bytes]
        wide = np.nan_to_num(to_floats(part, shape.element)).astype(np.float64).reshape(-1, shape.width)
        yield wide / np.maximum(np.sqrt((wide * wide).sum(axis=1, keepdims=True)), 1e-30)


def _token_bytes(shape: LayerShape) -> int:
    """The bytes of one token's keys."""
    return shape.width * shape.element.nbytes
