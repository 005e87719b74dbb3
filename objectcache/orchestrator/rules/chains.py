"""Our own names of an engine's blocks: a hash over every token up to the block's end, with the adapter and the salt.

    H_i = BLAKE2b-128(H_{i-1} || tokens of block i, little-endian uint32),   H_{-1} = BLAKE2b-128(adapter, salt)

Engines name their blocks by hashes of their own, which differ between versions and engines. Their events also carry the
tokens, so the index computes these names from the tokens, and a prompt's names can be compared with every engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

HASH_BYTES = 16
TOKEN_BYTES = 4
TOKEN_MAX = 0xFFFF_FFFF


def root_hash(adapter: str = "", salt: str = "") -> bytes:
    """H_{-1}: prompts of different adapters or salts share no block."""
    parts = adapter.encode(), salt.encode()
    return blake2b(b"".join(len(part).to_bytes(4, "little") + part for part in parts), digest_size=HASH_BYTES).digest()


def next_hash(parent: bytes, tokens: Sequence[int], extra: bytes = b"") -> bytes:
    """H_i of one block. `extra` is whatever else the block's KV depends on, an image for example. Raises ValueError for
    tokens that are no integers in [0, 2^32).
    """
    return blake2b(parent + packed(tokens) + extra, digest_size=HASH_BYTES).digest()


def block_hashes(tokens: Sequence[int] | npt.NDArray[np.uint32], block_tokens: int, root: bytes) -> list[bytes]:
    """H_0, H_1, … of the whole blocks of `tokens`. Raises ValueError as `next_hash` does."""
    data = packed(tokens)
    step, parent, hashes = TOKEN_BYTES * block_tokens, root, []
    for start in range(0, len(data) - step + 1, step):
        parent = blake2b(parent + data[start : start + step], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


def packed(tokens: Sequence[int] | npt.NDArray[np.uint32]) -> bytes:
    """Tokens as little-endian uint32. Raises ValueError for others than integers in [0, 2^32)."""
    values = np.asarray(tokens)
    if not values.size:
        return b""
    if values.ndim != 1 or values.dtype.kind not in "iu" or values.min() < 0 or values.max() > TOKEN_MAX:
        raise ValueError("tokens must be integers in [0, 2^32)")
    return values.astype("<u4").tobytes()
