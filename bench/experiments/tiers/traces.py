"""Recorded request streams in a compact form.

A line is one request: `t` is its arrival in milliseconds, `n` its length in tokens, and `r` its chunks as runs of
numbers: [first, count, first, count, …]. A chunk is 512 tokens; the last chunk of a request may be shorter.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path

from storage_server.eviction.policy import Request

CHUNK_TOKENS = 512
FOLDER = Path(__file__).with_name("traces")


class Trace(Enum):
    """By the names of their files."""

    CONVERSATION = "conversation"
    SYNTHETIC = "synthetic"


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests in the order of their arrival. `unique_bytes` has each chunk once. Bytes stand for tokens: a cache of KV
    takes the same number of bytes for each token, so the unit does not matter.
    """

    requests: Sequence[Request]
    unique_bytes: int


def read(trace: Trace, count_max: int | None = None) -> Stream:
    """The first `count_max` requests of a trace. Raises ValueError for a file that is not in the compact form."""
    return parsed(lzma.decompress((FOLDER / f"{trace.value}.jsonl.xz").read_bytes()).decode().splitlines()[:count_max])


def parsed(lines: Sequence[str]) -> Stream:
    """The requests of such lines. A chunk has as many bytes as tokens. Raises ValueError as `read` does."""
    requests: list[Request] = []
    sizes: dict[int, int] = {}
    for line in lines:
        entry = json.loads(line)
        firsts, counts = entry["r"][::2], entry["r"][1::2]
        keys = [key for first, count in zip(firsts, counts, strict=True) for key in range(first, first + count)]
        tokens = [CHUNK_TOKENS] * (len(keys) - 1) + [entry["n"] - CHUNK_TOKENS * (len(keys) - 1)]
        requests.append(Request(entry["t"] / 1000, tuple(keys), tuple(tokens)))
        sizes.update(zip(keys, tokens, strict=True))
    if any(before.now_s > after.now_s for before, after in pairwise(requests)):
        raise ValueError("requests are in the order of their arrival")
    return Stream(requests, sum(sizes.values()))
