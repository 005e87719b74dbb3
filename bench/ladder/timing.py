"""Where one request's time went: the server's own account from its answer, and the client's clock around it.

    x-amz-objectcache-timing: gateway;dur=0.31, storage;dur=2.10, transfer;dur=5.00

Durations are milliseconds, as in Server-Timing; what the client saw beyond them is its own part.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any

from nixl_client.client import ObjectCacheClient
from nixl_client.http import Stream

HEADER = "x-amz-objectcache-timing"
_ENTRY = re.compile(r"\s*([a-z_-]+)\s*;\s*dur=(\d+(?:\.\d+)?)\s*")


class Part(Enum):
    """Parts of a request's time (ObjectCache paper, section 4.4)."""

    CLIENT = "client"
    GATEWAY = "gateway"
    STORAGE = "storage"
    TRANSFER = "transfer"


_PARTS = frozenset(part.value for part in Part)


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: seconds until its head was there and until everything was, and the server's account in seconds."""

    head_s: float
    total_s: float
    server_s: Mapping[Part, float]


def parse_timing(text: str) -> dict[Part, float]:
    """The header's parts in seconds; unknown names are passed over. Raises ValueError for what is no such header."""
    found: dict[Part, float] = {}
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"{HEADER}: {text!r} is not understood")
        if match[1] in _PARTS:
            found[Part(match[1])] = float(match[2]) / 1e3
    return found


def split(seen: Seen, *, is_body_the_payload: bool) -> dict[Part, float]:
    """Seconds of each part, which together are the total. Where the payload is the answer's body, the server's account
    ends with the head, and what comes after it is transfer.
    """
    parts = {part: seen.server_s.get(part, 0.0) for part in (Part.GATEWAY, Part.STORAGE, Part.TRANSFER)}
    if is_body_the_payload:
        parts[Part.TRANSFER] += seen.total_s - seen.head_s
    return {Part.CLIENT: max(0.0, seen.total_s - sum(parts.values())), **parts}


class Tap:
    """Looks at the last answer a client got; for one request at a time."""

    def __init__(self, client: ObjectCacheClient) -> None:
        self._http: Any = client._http
        self._headers: Mapping[str, str] = {}
        self._head_at_s = 0.0

    def observe(self, request: Callable[[], None]) -> Seen | None:
        """Run one request; None where its answer carries no account."""
        self._headers = {}
        started_s = time.monotonic()
        request()
        ended_s = time.monotonic()
        text = self._headers.get(HEADER)
        if text is None:
            return None
        return Seen(self._head_at_s - started_s, ended_s - started_s, parse_timing(text))

    def __enter__(self) -> Tap:
        stream = self._http.stream

        def tapped(*arguments: Any, **options: Any) -> Stream:
            answer: Stream = stream(*arguments, **options)
            self._headers, self._head_at_s = answer.headers, time.monotonic()
            return answer

        self._http.stream = tapped
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        del self._http.stream
