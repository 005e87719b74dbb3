"""The names of SGLang's pages: sglang/LABEL/NAMESPACE/POOL/HASH.

HASH is SGLang's hash of a page, which stands for all tokens up to its end, the salt, and the adapter. All else that
decides what the bytes mean is in NAMESPACE, a digest, so that a mismatch is a miss. LABEL is the model's name for
people; nothing depends on it. A page that lies in several parts of host memory is one object for each part: POOL then
ends with the part's number, as in `kv.1`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from descriptors.prefix_keys import SGLANG_ROOT, label, metadata_of

FORMAT_VERSION = 1
"""The meaning of an object's bytes: one part of a page, or the whole page, as SGLang's host pool has it."""
STATE_POOL = "mamba"
"""The pool of linear states. Each tensor-parallel rank has its own, also where the KV is the same in all of them."""
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of this engine process among those that share a model. Sizes are at least 1."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    def fields(self, *, is_replicated: bool) -> dict[str, object]:
        """The part that names depend on. KV that every tensor-parallel rank has is stored once for all of them."""
        tensor = None if is_replicated else [self.tp_rank, self.tp_size]
        return {"tp": tensor, "pp": [self.pp_rank, self.pp_size], "cp": [self.cp_rank, self.cp_size]}


def is_replicated(pool: str, *, is_mla_model: bool, has_heads: bool) -> bool:
    """Whether all tensor-parallel ranks have the same bytes in this pool. A pool whose pages have heads is split among
    them, also in a model with MLA (a draft model's), and linear states are.
    """
    return is_mla_model and pool != STATE_POOL and not has_heads


@dataclass(frozen=True, slots=True)
class PageSpace:
    """The pages of one pool that engines of one kind share. `fields` are all that decides what the bytes mean, and
    `name` is what people call the model.
    """

    name: str
    pool: str
    fields: Mapping[str, object]
    part_count: int = 1

    @property
    def digest(self) -> str:
        """The namespace."""
        document = {"format": FORMAT_VERSION, "pool": self.pool, "parts": self.part_count, **self.fields}
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def prefix(self) -> str:
        """The part of the names that all objects of the pool share, and no others have."""
        return f"{SGLANG_ROOT}/{label(self.name)}/{self.digest}/"

    def object_names(self, hashes: Sequence[str], parts: Iterable[int] | None = None) -> list[str]:
        """The objects of these pages, page by page, and of each page these parts, or all of them."""
        numbers = range(self.part_count) if parts is None else tuple(parts)
        pool, prefix = label(self.pool), self.prefix
        places = [f"{prefix}{pool}.{number}/" if self.part_count > 1 else f"{prefix}{pool}/" for number in numbers]
        return [place + page_hash(each) for each in hashes for place in places]

    def metadata(self) -> dict[str, str]:
        """The user metadata of its objects."""
        return metadata_of({"model": self.name})


def page_hash(key: str) -> str:
    """SGLang's hash of a page, 64 hex digits, by which servers know a chunk; other keys are hashed into such."""
    return key if _HASH.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest()
