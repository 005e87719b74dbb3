"""Where a request's time went, by what the servers report in their answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from descriptors.tracing import TIMING_HEADER, parse_timing


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. The four add up to the time from sending the request to its end (ObjectCache paper, section 4.4).

    gateway_s: in the gateway.
    storage_s: on the storage side, for planning, lookups and waiting for bytes.
    transfer_s: moving the payload.
    client_s: the rest, which is the client's own work, the network's latency, and whatever a server does not report.
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
