"""FP8 (E4M3, as the OCP specification has it: no infinity, 448 at most), with one float32 scale for keys and one for
values.
"""

from __future__ import annotations

import numpy as np

from objectcache.kv_codecs.elements import Floats
from objectcache.kv_codecs.packing import Numbers

MOST = 448.0
_HALF = 127
NAN = 0x7F


def _table() -> Floats:
    """The value of each byte below 128."""
    numbers = np.arange(128)
    exponent, mantissa = numbers >> 3, numbers & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[NAN] = np.nan
    return values.astype(np.float32)


POSITIVE = _table()
ALL = np.concatenate([POSITIVE, -POSITIVE])
_MIDDLES = (POSITIVE[:_HALF - 1] + POSITIVE[1:_HALF]) / 2  # fmt: skip


def fp8_bytes(elements: int) -> int:
    """The bytes of so many elements, with both scales."""
    return 8 + elements


def fp8_encode(keys: Floats, values: Floats) -> Numbers:
    """The payload of keys and values."""
    parts: list[Numbers] = []
    numbers: list[Numbers] = []
    for half in (keys, values):
        clean = np.nan_to_num(half, nan=0.0, posinf=3e38, neginf=-3e38)
        most = float(np.abs(clean).max(initial=0.0))
        scale = np.float32(most / MOST if most > 0 else 1.0)
        scaled = np.abs(clean) / scale
        found = np.searchsorted(_MIDDLES, scaled.reshape(-1), side="right").astype(np.uint8)
        signs = np.where(clean.reshape(-1) < 0, 0x80, 0).astype(np.uint8)
        numbers.append(found | signs)
        parts.append(np.frombuffer(scale.tobytes(), dtype=np.uint8))
    return np.concatenate([*parts, *numbers])


def fp8_decode(payload: Numbers, tokens: int, width: int) -> tuple[Floats, Floats]:
    """Keys and values, each (tokens, width)."""
    scales = payload[:8].view("<f4")
    half = tokens * width
    keys, values = payload[8 : 8 + half], payload[8 + half : 8 + 2 * half]
    return tuple((ALL[part] * scale).reshape(tokens, width) for part, scale in ((keys, scales[0]), (values, scales[1])))
