"""Codecs that leave tokens out: a half or a quarter of a chunk's tokens is kept, exactly, and each says where it was.

    streaming   the first SINKS tokens and the most recent ones (StreamingLLM)
    keydiff     those whose keys are least like the mean key of the layer (KeyDiff); a key counts with all its heads

    payload: the kept tokens' places, uint32 each, ascending; their keys; their values

Both need keys and values alone, no attention. Decoded, a kept token lies in its place, and the others are zeros. A
model that attends to them as to any other token gives wrong answers, so a reader has to leave them out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kv_codecs.elements import Bytes, to_floats
from kv_codecs.layer import STREAMING, Codec, LayerShape, kept_count

SINKS = 4
PLACE_BYTES = 4
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
    keys = np.nan_to_num(to_floats(flat[: shape.nbytes // 2], shape.element)).reshape(shape.tokens, shape.width)
    wide = keys.astype(np.float64)
    normal = wide / np.maximum(np.sqrt((wide * wide).sum(axis=1, keepdims=True)), 1e-30)
    likeness = (normal * normal.mean(axis=0)).sum(axis=1).astype(np.float32)  # rounded, so that equal keys are equal
    return np.sort(np.argsort(likeness, kind="stable")[:count])


def _token_bytes(shape: LayerShape) -> int:
    """The bytes of one token's keys."""
    return shape.width * shape.element.nbytes
