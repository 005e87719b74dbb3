"""Where a request's time went: what the servers say of it in their answer, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from descriptors.tracing import TIMING_HEADER, parse_timing


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, which add up to the time from sending the request to its end: in the gateway; on the storage side for
    planning, lookups and waiting for bytes; moving the payload; and what is left, the client's own work and the
    way there and back. What a server does not say is the client's. (ObjectCache paper, section 4.4.)
    """

    client_s: float
    gateway_s: float
    storage_s: float
    transfer_s: float


def split_time(total_s: float, headers: Mapping[str, str], body_s: float = 0.0) -> Timing:
    """The split of `total_s` by an answer's headers (lower-case); `body_s` is how long its body was read."""
    said = parse_timing(headers.get(TIMING_HEADER))
    transfer_s = said.transfer_s + body_s
    client_s = max(0.0, total_s - said.gateway_s - said.storage_s - transfer_s)
    return Timing(client_s, said.gateway_s, said.storage_s, transfer_s)
