"""Prefix keys: the rolling hash that names a chunk by every token up to its end.

    H_i = SHA-256(H_{i-1} || tokens of chunk i, little-endian uint32),   H_{-1} = SHA-256(namespace)

The object key is the hex digest of H_i, behind the namespace's readable prefix. A partial last chunk has no key.
(ObjectCache paper, section 2.1.)
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote

import numpy as np

from descriptors.layout import LAYOUT_ID

ROOT, LMCACHE_ROOT, VLLM_TIER_ROOT, SGLANG_ROOT = "kv", "lmcache", "vllm", "sglang"
ROOTS = (ROOT, LMCACHE_ROOT, VLLM_TIER_ROOT, SGLANG_ROOT)
"""The first part of the names of our chunks, of LMCache's, of those of vLLM's tier, and of SGLang's pages: the second
part is the model's label in all of them.
"""
LABEL_CHARACTERS_MAX = 64
METADATA_CHARACTERS_MAX = 256
"""Each value has no more characters: an S3 object may have 2 KiB of metadata."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
MODEL_LABEL = re.compile("[A-Za-z0-9._-]{1,64}")
_RANKS = re.compile("tp[0-9]{1,6}of([1-9][0-9]{0,5})-pp[0-9]{1,6}of([1-9][0-9]{0,5})")
_PLAIN = "!#$&'()*+,/:;<=>?@[]^_`{|}~-."
"""The characters of metadata that need no percent sign."""


class RankCounts(NamedTuple):
    """Over how many ranks a model's KV is split: its heads by tensor parallelism, its layers by pipelines."""

    tp_size: int = 1
    pp_size: int = 1


ONE_RANK = RankCounts()


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides the tokens that decides what KV bytes mean. Two deployments that differ in any field share no
    key, so a mismatch finds nothing instead of wrong bytes. `name` is what people call the model, where `model` is a
    fingerprint.
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
    name: str = ""

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

    def prefix(self, chunk_tokens: int) -> str:
        """The part of the keys before the hash, which says whose chunks they are: by it the KV of one model can be
        listed, counted and deleted. Tenants keep `lora` and `salt` to themselves: they are in the hash alone.
        """
        dtype = self.dtype.partition(" ")[0].removeprefix("torch.")
        ranks = f"tp{self.tp_rank}of{self.tp_size}-pp{self.pp_rank}of{self.pp_size}"
        return f"{ROOT}/{label(self.name or self.model)}/{label(f'{self.layout}-{dtype}-{chunk_tokens}')}/{ranks}/"

    def metadata(self, chunk_tokens: int) -> dict[str, str]:
        """The user metadata of its chunks, by the names that S3 clients know it by, for `put_chunks`."""
        model = self.name or self.model
        return metadata_of({"model": model, "dtype": self.dtype, "layout": self.layout, "tokens": str(chunk_tokens)})


def label(model: str) -> str:
    """The name of a model in the characters that need no quotes anywhere, the last LABEL_CHARACTERS_MAX of them."""
    return _UNSAFE.sub("-", model).strip("-.")[-LABEL_CHARACTERS_MAX:] or "model"


def model_of(key: str) -> str:
    """The label of the model whose chunk has this key; empty for other keys."""
    root, _, rest = key.partition("/")
    name, slash, _ = rest.partition("/")
    return name[:LABEL_CHARACTERS_MAX] if slash and root in ROOTS else ""


def model_of_all(keys: Sequence[str]) -> str | None:
    """The label of the model of all these keys, empty where the first has none; None where others have another one."""
    model = model_of(keys[0])
    if not model:
        return None if any(map(model_of, keys)) else ""
    start = "/".join(keys[0].split("/", 2)[:2]) + "/"
    return model if all(key.startswith(start) for key in keys) else None


def rank_counts_of(keys: Sequence[str]) -> RankCounts:
    """Over how many ranks the KV of chunks with these keys is split, as `Namespace.prefix` says it; one each where the
    keys do not all say the same of one rank.
    """
    *before, _ = keys[0].split("/", 4)
    found = _RANKS.fullmatch(before[3]) if len(before) == 4 and before[0] == ROOT else None
    if found is None or not all(key.startswith("/".join(before) + "/") for key in keys):
        return ONE_RANK
    return RankCounts(int(found[1]), int(found[2]))


def metadata_of(texts: Mapping[str, str]) -> dict[str, str]:
    """Metadata with these values: what no header can have is percent-encoded, and what is too long is cut."""
    return {name: quote(text, safe=_PLAIN)[:METADATA_CHARACTERS_MAX] for name, text in texts.items() if text}


def _escape(value: str) -> str:
    return value.replace("%", "%25").replace("\n", "%0A").replace("\r", "%0D")


def chunk_keys(namespace: Namespace | str, tokens: Sequence[int] | np.ndarray, chunk_tokens: int) -> list[str]:
    """Keys of the whole chunks of `tokens`, in prefix order: 64 hex digits each, behind the namespace's prefix. A text
    as namespace gives the digits alone.

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
    digest, prefix = key_chain(namespace, chunk_tokens)
    keys = []
    for start in range(0, len(packed) - step + 1, step):
        digest = hashlib.sha256(digest + packed[start : start + step]).digest()
        keys.append(prefix + digest.hex())
    return keys


def key_chain(namespace: Namespace | str, chunk_tokens: int) -> tuple[bytes, str]:
    """H(-1), with which a chain of keys begins, and the part of the keys before their hashes."""
    if isinstance(namespace, str):
        return hashlib.sha256(namespace.encode()).digest(), ""
    return hashlib.sha256(namespace.text().encode()).digest(), namespace.prefix(chunk_tokens)
