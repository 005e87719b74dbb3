"""The hashes of blocks that an adapter has a part in, by the adapter's contents.

vLLM hashes an adapter's name and path with each block, so that the same weights under another name share nothing, and
other weights under the same name share everything. Here the blocks of such a request are hashed a second time, by
vLLM's own function, with a digest of the contents in place of both.

    vLLM      hash("lora", name, path; tokens)  ──▶  the engine's blocks, its host memory
    store     hash("lora", "", contents; tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Hasher = Callable[[Any], Sequence[bytes]]
"""vLLM's: the hashes of a request's whole blocks that are not in its `block_hashes` yet."""
BlockNames = Callable[[bytes], bytes | None]
"""From vLLM's hash of a block to the hash that the store has it by; None where its bytes are not known."""


def may_have_adapters(told: object, said_by_cards: Sequence[bool]) -> bool:
    """Whether blocks may be of an adapter. `told` is what the connector says, and the cards of workers what each says;
    where none has spoken they may.
    """
    if told is None and not said_by_cards:
        return True
    return bool(told) or any(said_by_cards)


class HashedRequest(Protocol):
    """vLLM's request, which grows."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """vLLM's hashes of its whole blocks."""


@dataclass(frozen=True, slots=True)
class _Contents:
    """In place of vLLM's LoRARequest, of which only these two are hashed."""

    lora_path: str
    lora_name: str = ""


class _Renamed:
    """The request as it would be with another adapter; `block_hashes` are those that are known already."""

    def __init__(self, request: HashedRequest, contents: str) -> None:
        self._request = request
        self.lora_request = _Contents(contents)
        self.block_hashes: list[bytes] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._request, name)


class AdapterHashes:
    """The `BlockNames` of one request whose adapter has these contents. Each block is hashed once, when it is first
    asked for.
    """

    def __init__(
        self, request: HashedRequest, hasher: Hasher, contents: str, is_current: Callable[[], bool] = lambda: True
    ) -> None:
        """`is_current` says whether the adapter still has these contents."""
        self._request = request
        self._hasher = hasher
        self._is_current = is_current
        self._has_changed = False
        self._renamed = _Renamed(request, contents)
        self._by_vllm: dict[bytes, bytes] = {}
        self._last: bytes | None = None

    def __call__(self, block_hash: bytes) -> bytes | None:
        """The hash by which the store has this block. None for a block that is not the request's, and for all of them
        once the adapter has changed.
        """
        if self._has_changed:
            return None
        found = self._by_vllm.get(block_hash)
        if found is None and self._grow():
            found = self._by_vllm.get(block_hash)
        return found

    def check(self) -> None:
        """Look whether the adapter has changed. To be called before bytes are stored or loaded: it reads no more than
        the state of files, which is too much for each block.
        """
        self._has_changed = self._has_changed or not self._is_current()

    def _grow(self) -> bool:
        """Hash the blocks that have come since the last call; whether there are any. Tokens that a request has had may
        be others in its next turn: then no block of it is known any more.
        """
        theirs, ours = self._request.block_hashes, self._renamed.block_hashes
        known = len(ours)
        if len(theirs) <= known or (known and theirs[known - 1] != self._last):
            return False
        ours.extend(self._hasher(self._renamed))
        count = min(len(theirs), len(ours))
        del ours[count:]
        self._by_vllm.update(zip(theirs[known:count], ours[known:count], strict=True))
        self._last = theirs[count - 1] if count else None
        return count > known
