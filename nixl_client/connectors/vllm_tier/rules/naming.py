"""The names of a tier's objects: vllm/LABEL/NAMESPACE/GROUP/HASH.

HASH is vLLM's hash of the chunk's last block, which stands for all tokens up to there, the salt, and the images. All
else that decides what the bytes mean is in NAMESPACE, a digest, so that a mismatch is a miss. LABEL is the model's name
for people; nothing depends on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
