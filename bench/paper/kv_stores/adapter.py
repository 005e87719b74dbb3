"""CASCADE's StorageAdapter, the work that the adapters are given, and what they answer.

Interpreters of other environments import this: it needs numpy and nothing else of others.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from objectcache.calibration.content import Bytes, VerificationError


class StorageAdapter(Protocol):
    """One store of KV blocks. A block has the bytes of its keys and of its values. Methods raise what the store's own
    client raises.
    """

    def initialize(self) -> bool:
        """Make ready for blocks; whether the store answers."""
        ...

    def put(self, block_id: str, key_data: Bytes, value_data: Bytes) -> bool:
        """Store a block, if it is not there yet; whether it is stored."""
        ...

    def get(self, block_id: str) -> tuple[Bytes, Bytes] | None:
        """A block's bytes; None where there is no such block."""
        ...

    def contains(self, block_id: str) -> bool:
        """Whether there is such a block."""
        ...

    def clear(self) -> None:
        """Remove every block."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request for the blocks of a prompt, named by their prefix, from the first on."""

    block_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Replay:
    """Prompts, one after the other: the leading blocks that are there are got, the others are put."""

    prompts: Sequence[Prompt]
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt: how many leading blocks were there, and the seconds it took to find and get them, and to put the
    others.
    """

    hit_blocks: int
    get_s: float
    put_s: float


@dataclass(frozen=True, slots=True)
class Replayed:
    """A whole replay; `problem` is the first failure or wrong byte."""

    answers: Sequence[Answer]
    problem: str | None = None


def block(block_id: str, nbytes: int) -> tuple[Bytes, Bytes]:
    """The keys and values of a block: its id makes them."""
    seed = int.from_bytes(hashlib.sha256(block_id.encode()).digest()[:8], "little")
    made = np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(nbytes), dtype=np.uint8)
    return made[: nbytes // 2], made[nbytes // 2 :]


def replay(adapter: StorageAdapter, work: Replay) -> Replayed:
    """Play the prompts. Each byte that is got is compared, untimed. Raises VerificationError; RuntimeError where the
    store refuses.
    """
    if not adapter.initialize():
        raise RuntimeError("the store does not answer")
    adapter.clear()
    answers = []
    for prompt in work.prompts:
        found: list[tuple[Bytes, Bytes]] = []
        get_s = put_s = 0.0
        for block_id in prompt.block_ids:
            started_s = time.monotonic()
            got = adapter.get(block_id) if adapter.contains(block_id) else None
            get_s += time.monotonic() - started_s
            if got is None:
                break
            found.append(got)
        for block_id, each in zip(prompt.block_ids, found, strict=False):
            require_equal(block_id, each, work.block_bytes)
        for block_id in prompt.block_ids[len(found) :]:
            key_data, value_data = block(block_id, work.block_bytes)
            started_s = time.monotonic()
            is_stored = adapter.put(block_id, key_data, value_data)
            put_s += time.monotonic() - started_s
            if not is_stored:
                raise RuntimeError(f"block {block_id} was not stored")
        answers.append(Answer(len(found), get_s, put_s))
    return Replayed(answers)


def require_equal(block_id: str, got: tuple[Bytes, Bytes], nbytes: int) -> None:
    """Raises VerificationError for other bytes than were put."""
    if not all(np.array_equal(one, other) for one, other in zip(got, block(block_id, nbytes), strict=True)):
        raise VerificationError(f"block {block_id}: wrong bytes")


def halves(data: Bytes) -> tuple[Bytes, Bytes]:
    """A block that a store keeps as one: its keys and its values."""
    return data[: len(data) // 2], data[len(data) // 2 :]
