"""What an object must be: bytes that a seed makes again at any time, and all that is told of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final

import numpy as np

from descriptors.units import KIB, MIB

PACKED_BYTES_MAX: Final = 8 * MIB
PART_BYTES_MIN: Final = 5 * MIB
BLOCK_BYTES: Final = 16 * KIB
SMALL_BYTES_MAX: Final = 64 * KIB
_EDGES = (0, 1, 4095, 4096, 4097, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 4 * BLOCK_BYTES + 1)
_LARGE = (MIB - 1, MIB, PACKED_BYTES_MAX - 1, PACKED_BYTES_MAX, PACKED_BYTES_MAX + 1, 20 * MIB)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, start + nbytes) of what `seed` makes."""

    seed: int
    nbytes: int
    start: int = 0

    def body(self) -> bytes:
        """The bytes."""
        made = np.random.Generator(np.random.SFC64(self.seed)).bytes(self.start + self.nbytes)
        return made[self.start :] if self.start else made


@dataclass(frozen=True, slots=True)
class Version:
    """One state of an object. `metadata` and `tags` are sorted pairs, so that versions compare."""

    pieces: tuple[Piece, ...]
    etag: str
    metadata: tuple[tuple[str, str], ...] = ()
    tags: tuple[tuple[str, str], ...] = ()
    content_type: str = "binary/octet-stream"

    @property
    def nbytes(self) -> int:
        """The size."""
        return sum(piece.nbytes for piece in self.pieces)

    def body(self) -> bytes:
        """The bytes."""
        return b"".join(piece.body() for piece in self.pieces)

    def copied(self) -> Version:
        """What CopyObject makes of it: one body, whose ETag is its MD5 also where the source was made of parts."""
        return replace(self, etag=md5(self.body())) if "-" in self.etag else self

    def __str__(self) -> str:
        return f"{self.nbytes} B etag {self.etag} metadata {dict(self.metadata)} tags {dict(self.tags)}"


def pairs(values: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """For `metadata` and `tags`."""
    return tuple(sorted(values.items()))


def md5(data: bytes) -> str:
    """An ETag."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def multipart_etag(etags: list[str]) -> str:
    """The ETag of an object made of parts: written here a second time, since it checks the server's."""
    digests = b"".join(bytes.fromhex(etag) for etag in etags)
    return f"{md5(digests)}-{len(etags)}"


def random_size(rng: Random) -> int:
    """0 B to 20 MiB: mostly small, often at an edge of a block, now and then around the packing threshold."""
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(_EDGES)
    if kind < 0.8:
        return rng.randrange(SMALL_BYTES_MAX)
    if kind < 0.95:
        return rng.randrange(2 * MIB)
    return rng.choice(_LARGE)
