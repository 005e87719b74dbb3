"""Keys of a request's chunks: which namespace each rank's KV is in, and their hash, taken on as tokens come."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from descriptors.prefix_keys import Namespace, key_chain

CACHED_MODEL = "models--"
"""Hugging Face's cache has a model ORG/NAME at models--ORG--NAME/snapshots/REVISION."""


@dataclass(frozen=True, slots=True)
class Feature:
    """An image, or another input that is no text, in place of `token_count` tokens from `offset` on. `identifier` is
    vLLM's hash of it, or what a client names it.
    """

    identifier: str
    offset: int
    token_count: int


def _no_hashes() -> Sequence[bytes]:
    return ()


@dataclass(frozen=True, slots=True)
class Prefix:
    """All that decides the KV of a request's tokens, beside the tokens and the engine: the contents of its adapter, its
    salt and its images. `block_hashes` gives vLLM's hashes of its whole blocks so far, which tell all of this, too;
    they are needed where chunks are named by them.
    """

    lora: str = ""
    salt: str = ""
    features: Sequence[Feature] = ()
    block_hashes: Callable[[], Sequence[bytes]] = _no_hashes


class ChunkChain(Protocol):
    """The keys of one prefix, in the order of its chunks."""

    def keys(self, tokens: Sequence[int], chunk_count: int) -> tuple[str, ...]:
        """The first `chunk_count` keys. `tokens` must go on from those of the calls before."""


class ChunkNames(Protocol):
    """How an engine's chunks are named: by a namespace and all tokens (`Deployment`), or by vLLM's hashes of blocks
    (`NativeDeployment`).
    """

    @property
    def rank_count(self) -> int:
        """Ranks that hold a part of each token's KV."""

    @property
    def worker_count(self) -> int:
        """Workers that load, and report."""

    @property
    def copies(self) -> int:
        """Workers that hold the same part."""

    def chains(self, chunk_tokens: int, prefix: Prefix) -> tuple[ChunkChain, ...]:
        """For each rank the keys of this prefix."""

    def renewed(self, epoch: str) -> ChunkNames:
        """The names from now on, when `epoch` is a text that nobody had before."""

    def published(self) -> dict[str, str] | None:
        """The labels that routers read of names by hashes of blocks; None where routers cannot make the names so."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The properties of one engine that KV bytes depend on. `name` is what people call the model. Each part of the KV
    is on `copies` workers: all tensor-parallel ranks have the same latents of MLA, and count as one rank then.
    """

    model: str
    dtype: str
    block_tokens: int
    tp_size: int = 1
    pp_size: int = 1
    name: str = ""
    copies: int = 1

    @property
    def rank_count(self) -> int:
        """Ranks that hold a part of each token's KV."""
        return self.tp_size * self.pp_size

    @property
    def worker_count(self) -> int:
        """Workers that load, and report."""
        return self.rank_count * self.copies

    def namespace(self, rank: int, lora: str, salt: str) -> Namespace:
        """The namespace of one rank (pipeline rank times `tp_size`, plus tensor rank) for requests of this adapter and
        this tenant.
        """
        pp_rank, tp_rank = divmod(rank, self.tp_size)
        return Namespace(
            model=self.model,
            dtype=self.dtype,
            block_tokens=self.block_tokens,
            tp_rank=tp_rank,
            tp_size=self.tp_size,
            pp_rank=pp_rank,
            pp_size=self.pp_size,
            lora=lora,
            salt=salt,
            name=self.name,
        )

    def chains(self, chunk_tokens: int, prefix: Prefix) -> tuple[KeyChain, ...]:
        """For each rank the keys of this prefix."""
        namespaces = [self.namespace(rank, prefix.lora, prefix.salt) for rank in range(self.rank_count)]
        return tuple(KeyChain(each, chunk_tokens, prefix.features) for each in namespaces)

    def renewed(self, epoch: str) -> Deployment:
        """The same engine from now on, when `epoch` is a text that nobody had before."""
        model = self.model.partition("\n")[0]
        return replace(self, model=f"{model}\n{epoch}")

    def published(self) -> dict[str, str] | None:
        """None: routers are told the properties themselves, beside the shape of the chunks."""
        return None

    def hash_count(self, chunk_tokens: int) -> int:
        """Hashes that one key takes."""
        return 1

    def prompt_keys(
        self, rank: int, tokens: Sequence[int] | npt.NDArray[np.uint32], chunk_tokens: int, count: int, salt: str
    ) -> tuple[str, ...]:
        """The keys of the first `count` chunks, without an adapter. Raises ValueError where tokens are too few."""
        return KeyChain(self.namespace(rank, "", salt), chunk_tokens).keys(tokens, count)


def short_name(model: str) -> str:
    """The name that people know a model by: the last part of its name or path, or the name in the path of Hugging
    Face's cache. Two engines share chunks only if they agree on it.
    """
    parts = [part for part in model.split("/") if part not in ("", ".")]
    cached = next((part for part in reversed(parts) if part.startswith(CACHED_MODEL)), None)
    return cached.split("--")[-1] if cached is not None else (parts[-1] if parts else model)


class KeyChain:
    """The keys of one prefix in one namespace, as `descriptors.prefix_keys.chunk_keys` gives them, each hashed once.
    The tokens in place of an image are the same for all images: a chunk that has some is hashed with the digest of the
    identifier and the place of the image, counted from the chunk's first token, behind its tokens.
    """

    def __init__(self, namespace: Namespace, chunk_tokens: int, features: Sequence[Feature] = ()) -> None:
        self._digest, self._prefix = key_chain(namespace, chunk_tokens)
        self._chunk_tokens = chunk_tokens
        self._keys: list[str] = []
        self._features = sorted(features, key=lambda each: each.offset)

    def keys(self, tokens: Sequence[int] | npt.NDArray[np.uint32], chunk_count: int) -> tuple[str, ...]:
        """The first `chunk_count` keys. `tokens` must go on from those of the calls before."""
        known = len(self._keys)
        step = self._chunk_tokens
        if chunk_count > known:
            packed = np.asarray(tokens[known * step : chunk_count * step], dtype="<u4").tobytes()
            if len(packed) != 4 * step * (chunk_count - known):
                raise ValueError(f"{len(tokens)} tokens have no {chunk_count} chunks of {step}")
            for start in range(0, len(packed), 4 * step):
                images = self._images(len(self._keys) * step) if self._features else b""
                self._digest = hashlib.sha256(self._digest + packed[start : start + 4 * step] + images).digest()
                self._keys.append(self._prefix + self._digest.hex())
        return tuple(self._keys[:chunk_count])

    def _images(self, start: int) -> bytes:
        """The part of the hash that tells the images of the chunk from `start` on. Features that end before it are
        needed no more.
        """
        self._features = [each for each in self._features if each.offset + each.token_count > start]
        end = start + self._chunk_tokens
        return b"".join(
            hashlib.sha256(each.identifier.encode()).digest() + struct.pack("<q", each.offset - start)
            for each in self._features
            if each.offset < end
        )
