"""Which objects are chunks: immutable by contract, and known by bucket, key and ETag. Pure."""

from __future__ import annotations

import re

from descriptors.chunk_flags import is_flagged
from descriptors.headers import CHUNK_HEADER
from descriptors.objects import Attributes

CHUNK_KEY = re.compile(r"(?:.*/)?[0-9a-f]{64}", re.DOTALL)
"""The last component is the hash of a prefix."""


def is_chunk_key(key: str) -> bool:
    """Whether the last component of the key is 64 lower-case hex digits, as the hash of a prefix is."""
    return CHUNK_KEY.fullmatch(key) is not None


def is_chunk(key: str, attributes: Attributes) -> bool:
    """Whether an object is a chunk: its key says so, or a flag did when it was put."""
    return is_chunk_key(key) or is_flagged(attributes, CHUNK_HEADER)
