"""A tier publishes the names and the shape of its objects in vLLM's metrics, so that a router can ask the store for the
very same ones.

    vllm:objectcache_tier_info{space="vllm/…/",none_hash="…",group="0",hash_tokens="16",chunk_tokens="16",…} 1
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from descriptors.prefix_keys import VLLM_TIER_ROOT
from nixl_client.connectors.vllm_tier.rules.naming import GROUP_BYTES, object_name
from nixl_client.connectors.vllm_tier.rules.rows import RowForm

TIER_INFO = "vllm:objectcache_tier_info"
TIER_LABELS = (
    "space", "none_hash", "group", "hash_tokens", "chunk_tokens", "chunk_bytes", "endpoint", "bucket",
)  # fmt: skip
HASHING = "sha256"
"""vLLM's default, and the only one that a router computes: others need their own libraries, or have a seed that is a
secret.
"""
DIGEST_BYTES = 32
SPACE_MAX = 256


@dataclass(frozen=True, slots=True)
class TierNames:
    """The names of a prompt's objects in `space`: those of `group`, which keeps every block of a prefix, so that others
    are there if it is. `none_hash` stands before the first block; `hash_tokens` tokens are hashed at a time.
    """

    space: str
    none_hash: bytes
    group: int
    hash_tokens: int

    @property
    def rank_count(self) -> int:
        """All ranks' KV is in one object."""
        return 1

    def hash_count(self, chunk_tokens: int) -> int:
        """Hashes that one key takes."""
        return max(1, chunk_tokens // self.hash_tokens)

    def prompt_keys(
        self, rank: int, tokens: Sequence[int] | npt.NDArray[np.uint32], chunk_tokens: int, count: int, salt: str
    ) -> tuple[str, ...]:
        """The keys of the first `count` chunks, hashed as vLLM does (`hash_block_tokens` with sha256, 0.32 and 0.33).
        Raises ValueError where a chunk is no whole number of hashes, or tokens are too few.
        """
        step = self.hash_tokens
        if chunk_tokens % step or len(tokens) < count * chunk_tokens:
            raise ValueError(f"{len(tokens)} tokens have no {count} chunks of {chunk_tokens}, hashed {step} at a time")
        numbers = np.asarray(tokens[: count * chunk_tokens]).tolist()
        digest, tail, names = self.none_hash, self.group.to_bytes(GROUP_BYTES, "big"), []
        for end in range(step, len(numbers) + 1, step):
            extra = (("cache_salt", salt),) if salt and end == step else None
            block = (digest, tuple(numbers[end - step : end]), extra)
            digest = hashlib.sha256(pickle.dumps(block, protocol=pickle.HIGHEST_PROTOCOL)).digest()
            if not end % chunk_tokens:
                names.append(object_name(self.space, digest + tail))
        return tuple(names)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One of vLLM's cache groups: the tokens of its chunks, how its rows are used, and whether each of its layers keeps
    every block of a prefix.
    """

    number: int
    chunk_tokens: int
    form: RowForm
    is_whole: bool


def tier_labels(
    space: str, none_hash: bytes, hash_tokens: int, groups: Sequence[CacheGroup], endpoint: str, bucket: str
) -> tuple[str, ...] | None:
    """The values of TIER_LABELS. The bytes are those that each chunk adds to a load, of all groups that keep every
    block. None where no group does: which objects of a prefix are needed then is vLLM's to know.
    """
    whole = [group for group in groups if group.is_whole]
    if not whole:
        return None
    asked = whole[0]
    nbytes = sum(-(-group.form.nbytes * asked.chunk_tokens // group.chunk_tokens) for group in whole)
    numbers = (asked.number, hash_tokens, asked.chunk_tokens, nbytes)
    return space, none_hash.hex(), *map(str, numbers), endpoint, bucket


def parse_names(labels: Mapping[str, str]) -> TierNames:
    """The names that a tier has published. Raises KeyError, ValueError for labels of no tier."""
    names = TierNames(
        labels["space"], bytes.fromhex(labels["none_hash"]), int(labels["group"]), int(labels["hash_tokens"])
    )
    is_space = names.space.startswith(f"{VLLM_TIER_ROOT}/") and len(names.space) <= SPACE_MAX
    is_group = 0 <= names.group < 1 << 16
    if not is_space or not is_group or len(names.none_hash) != DIGEST_BYTES or names.hash_tokens < 1:
        raise ValueError("these are no names of a tier")
    return names
