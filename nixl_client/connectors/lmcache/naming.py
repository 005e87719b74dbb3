"""Names of LMCache's chunks as objects: lmcache/LABEL/NAMESPACE/HASH.

HASH is LMCache's own hash of all tokens up to the chunk's end. NAMESPACE is a digest of everything else that decides
what a chunk's bytes mean, so that a mismatch is a miss. LABEL is the model's name in safe characters, for people who
list or delete by prefix; nothing depends on it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

ROOT = "lmcache"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class ChunkSpace:
    """What chunks that may follow each other in a prefix have in common.

    `mode` tells LMCache's two modes apart, which hash differently. `rank` says which part of the KV it is in the words
    of the mode: world size and worker, or the packed rank and the group of layers. `tags` keep tenants apart.
    `layout` is the shape of a full chunk.
    """

    mode: str
    model: str
    rank: str
    dtype: str
    layout: str
    tags: tuple[tuple[str, str], ...] = ()

    def prefix(self) -> str:
        """The part of the names before the hash."""
        parts = (
            self.mode,
            self.model,
            self.rank,
            self.dtype,
            self.layout,
            *(part for tag in self.tags for part in tag),
        )
        text = "".join(f"{len(part)}:{part}" for part in parts)
        label = _UNSAFE.sub("-", self.model).strip("-.")[-64:] or "model"
        return f"{ROOT}/{label}/{hashlib.sha256(text.encode()).hexdigest()[:32]}/"


def object_name(space: ChunkSpace, chunk_hash: bytes | int) -> str:
    """The object of one chunk."""
    return space.prefix() + (chunk_hash.hex() if isinstance(chunk_hash, bytes) else f"{chunk_hash:x}")
