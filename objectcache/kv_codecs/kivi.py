"""KIVI: keys are quantized by channel, values by token (Liu et al., ICML 2024).

    q = round((x - zero) / scale),   scale = (max - min) / (2^bits - 1),   zero = min     of each group
    keys: a group is one channel over `group_of(tokens)` tokens;  values: one token over `group_of(width)` channels

Keys and values may have different bits. Scales and zeros are float16 and count in every ratio. A group whose scale
would not be a finite float16 is clipped to the range of float16. NaN is taken as 0.
"""

from __future__ import annotations

import numpy as np

from objectcache.kv_codecs.elements import Floats
from objectcache.kv_codecs.layer import LayerShape, group_of
from objectcache.kv_codecs.packing import Numbers, pack, packed_bytes, unpack

HALF_MAX = 65_504.0


def kivi_bytes(shape: LayerShape, key_bits: int, value_bits: int) -> int:
    """The bytes of a layer's payload."""
    _, value_groups, value_start = kivi_starts(shape, key_bits)
    return value_start + 4 * value_groups + packed_bytes(shape.half_elements, value_bits)


def kivi_starts(shape: LayerShape, key_bits: int) -> tuple[int, int, int]:
    """The groups of the keys, those of the values, and where in the payload the values begin."""
    key_groups = shape.tokens // group_of(shape.tokens) * shape.width
    value_groups = shape.width // group_of(shape.width) * shape.tokens
    return key_groups, value_groups, 4 * key_groups + packed_bytes(shape.half_elements, key_bits)


def kivi_encode(keys: Floats, values: Floats, key_bits: int, value_bits: int) -> Numbers:
    """The payload of keys and values, each (tokens, width)."""
    tokens, width = keys.shape
    step, span = group_of(tokens), group_of(width)
    by_channel = keys.reshape(tokens // step, step, width)
    by_token = values.reshape(tokens, width // span, span)
    parts: list[Numbers] = []
    for grouped, axis, bits in ((by_channel, 1, key_bits), (by_token, 2, value_bits)):
        numbers, scale, zero = _quantized(grouped, axis, bits)
        parts += [scale.view(np.uint8).reshape(-1), zero.view(np.uint8).reshape(-1), pack(numbers, bits)]
    return np.concatenate(parts)


def kivi_decode(payload: Numbers, shape: LayerShape, key_bits: int, value_bits: int) -> tuple[Floats, Floats]:
    """Keys and values, each (tokens, width). `payload` has `kivi_bytes`."""
    tokens, width = shape.tokens, shape.width
    step, span = group_of(tokens), group_of(width)
    halves: list[Floats] = []
    start = 0
    by_channel = (tokens // step, 1, width), (tokens // step, step, width), key_bits
    by_token = (tokens, width // span, 1), (tokens, width // span, span), value_bits
    for outer, inner, bits in (by_channel, by_token):
        groups = int(np.prod(outer))
        scale = payload[start : start + 2 * groups].view("<f2").astype(np.float32).reshape(outer)
        zero = payload[start + 2 * groups : start + 4 * groups].view("<f2").astype(np.float32).reshape(outer)
        start += 4 * groups
        size = packed_bytes(tokens * width, bits)
        numbers = unpack(payload[start : start + size], tokens * width, bits).reshape(inner)
        start += size
        halves.append((numbers.astype(np.float32) * scale + zero).reshape(tokens, width))
    return halves[0], halves[1]


def _quantized(values: Floats, axis: int, bits: int) -> tuple[Numbers, np.ndarray, np.ndarray]:
    """Numbers, and scale and zero of each group along an axis as float16, by which the numbers were chosen."""
    finite = np.clip(np.nan_to_num(values, nan=0.0, posinf=HALF_MAX, neginf=-HALF_MAX), -HALF_MAX, HALF_MAX)
    # of zeros with both signs either may be the least: adding zero makes it the positive one
    least = finite.min(axis=axis, keepdims=True) + np.float32(0)
    greatest = finite.max(axis=axis, keepdims=True) + np.float32(0)
    levels = (1 << bits) - 1
    zero = least.astype(np.float16)
    scale = np.minimum((greatest - least) / levels, HALF_MAX).astype(np.float16)
    step = scale.astype(np.float32)
    safe = np.where(step > 0, step, 1.0)
    numbers = np.clip(np.rint((finite - zero.astype(np.float32)) / safe), 0, levels)
    return np.where(step > 0, numbers, 0).astype(np.uint8), scale.astype("<f2"), zero.astype("<f2")
