"""The names of a tier's objects: vllm/LABEL/NAMESPACE/GROUP/HASH.

HASH is vLLM's hash of the chunk's last block, which stands for all tokens up to there, the salt, and the images. All
else that decides what the bytes mean is in NAMESPACE, a digest, so that a mismatch is a miss. LABEL is the model's name
for people; nothing depends on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from descriptors.prefix_keys import VLLM_TIER_ROOT, label, metadata_of

FORMAT_VERSION = 1
"""The meaning of an object's bytes: the used bytes of a row, in the row's order."""
GROUP_BYTES = 4
"""A key of vLLM ends with the number of the cache group."""


@dataclass(frozen=True, slots=True)
class TierSpace:
    """The objects that engines of one kind share. `fields` are all that decides what the bytes mean, and `name` is what
    people call the model.
    """

    name: str
    fields: Mapping[str, object]

    @property
    def digest(self) -> str:
        """The namespace."""
        text = json.dumps({"format": FORMAT_VERSION, **self.fields}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def prefix(self) -> str:
        """The part of the names that all objects share."""
        return f"{VLLM_TIER_ROOT}/{label(self.name)}/{self.digest}/"

    @property
    def about(self) -> str:
        """The object that says how the engines of this namespace hash."""
        return f"{self.prefix}about"

    def renewed(self, epoch: str) -> TierSpace:
        """The objects of the same engines from now on, when `epoch` is a text that nobody had before."""
        return replace(self, fields={**self.fields, "epoch": epoch})

    def metadata(self) -> dict[str, str]:
        """The user metadata of its objects."""
        return metadata_of({"model": self.name})


def group_of(key: bytes) -> int:
    """The number of a key's cache group."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def object_name(prefix: str, key: bytes) -> str:
    """The object of vLLM's key."""
    return f"{prefix}{group_of(key)}/{key[:-GROUP_BYTES].hex()}"


class BlockChain:
    """The keys of one request's chunks in a group that keeps every block. `block_hashes` gives vLLM's hashes of its
    whole blocks so far, as the store has them, of which each chunk takes `hashes_per_chunk`.
    """

    def __init__(
        self, prefix: str, group: int, hashes_per_chunk: int, block_hashes: Callable[[], Sequence[bytes]]
    ) -> None:
        self._prefix = prefix
        self._tail = group.to_bytes(GROUP_BYTES, "big")
        self._hashes_per_chunk = hashes_per_chunk
        self._block_hashes = block_hashes

    def keys(self, tokens: object, chunk_count: int) -> tuple[str, ...]:
        """The first `chunk_count` keys; the tokens are in the hashes. Raises ValueError where too few are hashed."""
        hashes, step = self._block_hashes(), self._hashes_per_chunk
        if chunk_count * step > len(hashes):
            raise ValueError(f"{len(hashes)} blocks have no {chunk_count} chunks")
        return tuple(
            object_name(self._prefix, hashes[end - 1] + self._tail) for end in range(step, chunk_count * step + 1, step)
        )
