"""One request as the dispatchers see it: what of it may go next, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from storage_server.scheduler.demand import Demand

AHEAD_MAX = 2
"""Payloads let go that the transport has not taken yet: enough to keep it busy, few enough that a client that stops
reading uses no more of the link."""


class PayloadBytes(Protocol):
    """The bytes of each payload of a layer, in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Tenant:
    """An access key's part of the link: its weight, the most it may use, and its requests' priority."""

    name: str
    weight: float = 1.0
    rate_max_bytes_per_s: float | None = None
    priority: int = 0


@dataclass(slots=True, eq=False)
class Flow:
    """`layer_payloads` are the bytes of the payloads of each layer, in order; a chunk-major request is one layer.

    Weight, cap and priority of `demand` are its tenant's, and split among the tenant's requests.
    """

    number: int
    tenant: Tenant
    demand: Demand
    layer_payloads: PayloadBytes
    came_s: float
    is_chunkwise: bool = False
    layer_index: int = 0
    """Of the next payload; `layer_count` when all have been let go."""
    payload_index: int = 0
    """Of the next payload within its layer."""
    layer_left_bytes: int = 0
    """Of the next payload's layer, that payload included."""
    ahead_count: int = 0
    epoch: int = 0
    rate_bytes_per_s: float = 0.0
    """What was offered: held, or expected on the whole."""
    _shared_by: int = 0

    def __post_init__(self) -> None:
        self.layer_left_bytes = self.demand.layer_bytes

    @property
    def is_over(self) -> bool:
        """Whether every payload has been let go."""
        return self.layer_index == self.demand.layer_count

    @property
    def is_blocked(self) -> bool:
        """Whether the transport is behind, or nothing is left."""
        return self.ahead_count >= AHEAD_MAX or self.is_over

    @property
    def payload_bytes(self) -> int:
        """Of the next payload."""
        return self.layer_payloads[self.payload_index]

    @property
    def left_bytes(self) -> int:
        """Of the whole request."""
        later = self.demand.layer_count - self.layer_index - 1
        return 0 if self.is_over else self.layer_left_bytes + later * self.demand.layer_bytes

    def again(self, tenant: Tenant) -> Flow:
        """The same request, as far as it is, before another schedule admits it."""
        flow = Flow(self.number, tenant, self.demand, self.layer_payloads, self.came_s, self.is_chunkwise)
        flow.layer_index, flow.payload_index = self.layer_index, self.payload_index
        flow.layer_left_bytes, flow.ahead_count = self.layer_left_bytes, self.ahead_count
        return flow

    def share_tenant(self, request_count: int) -> None:
        """The tenant has so many requests at once: each weighs and may use its part."""
        if request_count == self._shared_by:
            return
        self._shared_by = request_count
        cap = self.tenant.rate_max_bytes_per_s
        self.demand = replace(
            self.demand,
            weight=self.tenant.weight / request_count,
            rate_max_bytes_per_s=None if cap is None else cap / request_count,
            priority=self.tenant.priority,
        )

    def let_go(self) -> bool:
        """The next payload goes; whether that completes a layer."""
        self.ahead_count += 1
        self.layer_left_bytes -= self.payload_bytes
        self.payload_index += 1
        if self.payload_index < len(self.layer_payloads):
            return False
        self.payload_index = 0
        self.layer_index += 1
        self.layer_left_bytes = self.demand.layer_bytes
        return True
