"""Arrivals from a request trace in the form of Mooncake's FAST'25 release: lines of JSON with `timestamp` in
milliseconds, `input_length` in tokens and `hash_ids` of blocks of 512 tokens. Pure but for reading the file.

What of a request is cached is the longest beginning of its blocks that have all been seen before, in a cache that
forgets nothing; at least one token is computed.

`bench/data/mooncake_conversation_excerpt.jsonl` is 400 lines of `FAST25-release/traces/conversation_trace.jsonl` of
https://github.com/kvcache-ai/Mooncake (Apache-2.0), unchanged: of its first 3,000 requests, the first ones whose second
block begins four of them or more, which are those that a cache serves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.scheduler.simulation import SimulatedRequest
from bench.scheduler.workloads import make_request
from storage_server.scheduler.flow import Tenant

BLOCK_TOKENS = 512
EXCERPT = Path(__file__).resolve().parent.parent / "data" / "mooncake_conversation_excerpt.jsonl"


class TraceError(Exception):
    """The file cannot be read, or is no such trace; the message names the line."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of the trace, of which so many tokens are cached."""

    came_s: float
    context_tokens: int
    cached_tokens: int


def read_trace(path: Path, count_max: int | None = None) -> list[TraceEntry]:
    """The first requests of the file, by their time. Raises TraceError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from None
    entries: list[TraceEntry] = []
    seen: set[int] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if count_max is not None and len(entries) == count_max:
            break
        try:
            fields = json.loads(line)
            came_s = float(fields["timestamp"]) / 1e3
            tokens = int(fields["input_length"])
            blocks = [int(block) for block in fields["hash_ids"]]
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path}, line {number}: {error!r}") from None
        if tokens < 1 or came_s < 0:
            raise TraceError(f"{path}, line {number}: {tokens} tokens at {came_s} s")
        entries.append(TraceEntry(came_s, tokens, min(_known(blocks, seen) * BLOCK_TOKENS, tokens - 1)))
        seen.update(blocks)
    if not entries:
        raise TraceError(f"{path}: no requests")
    return sorted(entries, key=lambda entry: entry.came_s)


def trace_requests(entries: Iterable[TraceEntry]) -> list[SimulatedRequest]:
    """Those that load something, each of a tenant of its own: the trace names none. Raises TraceError without any."""
    requests = [
        make_request(entry.cached_tokens, entry.context_tokens, Tenant(f"r{index}"), entry.came_s)
        for index, entry in enumerate(entries)
        if entry.cached_tokens
    ]
    if not requests:
        raise TraceError("no request of the trace finds anything cached")
    return requests


def _known(blocks: Iterable[int], seen: set[int]) -> int:
    count = 0
    for block in blocks:
        if block not in seen:
            break
        count += 1
    return count
