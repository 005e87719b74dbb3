"""Which keys of a lookup are stored, as a bitmap: bit i of the answer is key i, the lowest bit of each byte first.

keys A B C D, stored A and C   ->   0b0101, base64 "BQ=="
"""

from __future__ import annotations

import base64
import binascii

import numpy as np

Presence = tuple[bool, ...]
"""For each key whether it is stored."""


def leading_count(present: Presence) -> int:
    """How many keys, from the first, are stored without a gap."""
    return next((at for at, is_there in enumerate(present) if not is_there), len(present))


def presence_text(present: Presence) -> str:
    """The base64 that `parse_presence` reads."""
    return base64.b64encode(np.packbits(np.array(present, dtype=bool), bitorder="little").tobytes()).decode()


def parse_presence(text: object, key_count: int) -> Presence:
    """The answer about so many keys. Raises ValueError for anything else."""
    if not isinstance(text, str):
        raise ValueError("present is no text")
    try:
        packed = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"present is no base64: {error}") from error
    if len(packed) != -(-key_count // 8):
        raise ValueError(f"present has {len(packed)} bytes for {key_count} keys")
    bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little")
    if bits[key_count:].any():
        raise ValueError("present has bits of more keys than were asked for")
    return tuple(bits[:key_count].astype(bool).tolist())
