"""Prefix keys: the rolling hash that names a chunk by every token up to its end.

    H_i = SHA-256(H_{i-1} || tokens of chunk i, little-endian uint32),   H_{-1} = SHA-256(namespace)

The object key is the hex digest of H_i. A partial last chunk has no key. (ObjectCache paper, section 2.1.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from descriptors.layout import LAYOUT_ID


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides the tokens that decides what KV bytes mean. Two deployments that differ in any field share no
    key, so a mismatch finds nothing instead of wrong bytes.
    """

    model: str
    dtype: str
    block_tokens: int
    layout: str = LAYOUT_ID
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    lora: str = ""
    salt: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError where model or dtype are empty, or there are no tokens in a block: different models would
        share keys.
        """
        if not self.model or not self.dtype or self.block_tokens < 1:
            raise ValueError("a namespace needs a model, a dtype and block_tokens of at least 1")

    def text(self) -> str:
        """The namespace string: `name=value` lines in field order; `%` and line breaks in values are escaped, so no
        two namespaces share a text.
        """
        names = ("model", "dtype", "layout", "block_tokens", "tp_rank", "tp_size", "pp_rank", "pp_size", "lora", "salt")
        return "".join(f"{name}={_escape(str(getattr(self, name)))}\n" for name in names)


def _escape(value: str) -> str:
    return value.replace("%", "%25").replace("\n", "%0A").replace("\r", "%0D")


def chunk_keys(namespace: str, tokens: Sequence[int] | np.ndarray, chunk_tokens: int) -> list[str]:
    """Keys of the whole chunks of `tokens`, in prefix order: 64 hex digits each.

    `tokens` are integers in [0, 2^32). Raises ValueError for anything else or for `chunk_tokens` < 1.
    """
    if chunk_tokens < 1:
        raise ValueError("chunk_tokens must be at least 1")
    values = np.asarray(tokens)
    if values.ndim != 1:
        raise ValueError("tokens must be one-dimensional")
    if values.size and (values.dtype.kind not in "iu" or values.min() < 0 or values.max() > 0xFFFFFFFF):
        raise ValueError("tokens must be integers in [0, 2^32)")
    packed = values.astype("<u4").tobytes()
    step = 4 * chunk_tokens
    digest = hashlib.sha256(namespace.encode()).digest()
    keys = []
    for start in range(0, len(packed) - step + 1, step):
        digest = hashlib.sha256(digest + packed[start : start + step]).digest()
        keys.append(digest.hex())
    return keys
