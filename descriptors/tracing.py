"""A request's id, and the times of its phases, in headers between client, gateway and storage server (paper, 4.4).

    x-amz-objectcache-timing: gateway;dur=0.310, storage;dur=2.100, transfer;dur=5.000

Milliseconds, in the syntax of Server-Timing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

REQUEST_ID_HEADER = "x-amz-objectcache-request-id"
PEER_REQUEST_ID_HEADER = "x-objectcache-request-id"
"""The header with the request's id between gateway and storage server."""
TIMING_HEADER = "x-amz-objectcache-timing"
TIMING_CHARACTERS_MAX = 256
_PART = re.compile(r"[ \t]*(gateway|storage|transfer);dur=([0-9]{1,12}(?:\.[0-9]{1,9})?)[ \t]*\Z")


class Phase(Enum):
    """A part of a request's time. A gateway tells the first three apart. A storage server tells the phases of a
    delivery apart, from PLAN on: planning, waiting for the link while others have it, waiting for bytes to be gathered,
    and waiting for the transport.
    """

    GATEWAY = "gateway"
    STORAGE = "storage"
    TRANSFER = "transfer"
    PLAN = "plan"
    WAIT = "wait"
    GATHER = "gather"


@dataclass(frozen=True, slots=True)
class ServerTiming:
    """The servers' parts of a request: `storage` is planning, lookups and waiting for bytes; `transfer` is waiting for
    the transport; `gateway` is the rest.
    """

    gateway_s: float = 0.0
    storage_s: float = 0.0
    transfer_s: float = 0.0


def timing_header(timing: ServerTiming) -> str:
    """The header's value."""
    parts_ms = 1e3 * timing.gateway_s, 1e3 * timing.storage_s, 1e3 * timing.transfer_s
    return "gateway;dur={:.3f}, storage;dur={:.3f}, transfer;dur={:.3f}".format(*parts_ms)


def parse_timing(text: str | None) -> ServerTiming:
    """The times in an answer's header. Parts that are missing or malformed are 0."""
    parts: dict[str, float] = {}
    if text is not None and len(text) <= TIMING_CHARACTERS_MAX:
        for entry in text.split(","):
            match = _PART.match(entry)
            if match is not None:
                parts.setdefault(match[1], float(match[2]) / 1e3)
    return ServerTiming(parts.get("gateway", 0.0), parts.get("storage", 0.0), parts.get("transfer", 0.0))
