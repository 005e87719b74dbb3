"""Flow: one request as the dispatchers see it, with its progress through its layers and their payloads.

Example: 2 layers, each of payloads of 4 and 2 bytes. At first `payload_bytes` is 4, `layer_left_bytes` 6 and
`left_bytes` 12. After one `dispatch` they are 2, 2 and 8; after the second, which completes the layer, 4, 6 and 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from storage_server.delivery.scheduler.demand import Demand
from storage_server.planning.plan import GroupSizes

AHEAD_MAX = 2
"""The most payloads that were dispatched and that the transport has not taken: enough to keep the transport busy, and
few enough that a client that stops reading soon uses no more of the link.
"""


@dataclass(frozen=True, slots=True)
class LinkTenant:
    """An access key's part of the link: its weight, its cap, and the priority of its requests."""

    name: str
    weight: float = 1.0
    rate_max_bytes_per_s: float | None = None
    priority: int = 0


@dataclass(slots=True, eq=False)
class Flow:
    """A request under way. `layers` are the sizes of each layer and of its payloads, in order; a chunk-major request
    has one layer.

    Weight and cap of `demand` are the request's parts of its tenant's; the priority is the tenant's.
    """

    number: int
    tenant: LinkTenant
    demand: Demand
    layers: Sequence[GroupSizes]
    came_s: float
    is_chunkwise: bool = False
    layer_index: int = 0
    """The layer of the next payload; `layer_count` when all payloads have been dispatched."""
    payload_index: int = 0
    """The index of the next payload within its layer."""
    layer_left_bytes: int = 0
    """The bytes that the next payload's layer still needs, those of that payload included."""
    left_bytes: int = 0
    """The bytes that the whole request still needs."""
    dispatched_bytes: int = 0
    """The bytes of the payload that was dispatched last."""
    ahead_count: int = 0
    epoch: int = 0
    rate_bytes_per_s: float = 0.0
    """The rate offered to the client: the held rate, or the expected mean rate."""
    _shared_by: int = 0

    def __post_init__(self) -> None:
        self.layer_left_bytes = self.layers[0].nbytes
        self.left_bytes = sum(layer.nbytes for layer in self.layers)

    @property
    def is_over(self) -> bool:
        """Whether every payload has been dispatched."""
        return self.layer_index == len(self.layers)

    @property
    def is_blocked(self) -> bool:
        """Whether the next payload cannot go: the transport is behind, or no payload is left."""
        return self.ahead_count >= AHEAD_MAX or self.is_over

    @property
    def payload_bytes(self) -> int:
        """The bytes of the next payload."""
        return self.layers[self.layer_index].payloads[self.payload_index]

    def for_another_schedule(self, tenant: LinkTenant) -> Flow:
        """A copy with the same progress, for another schedule, which has not admitted it yet."""
        flow = Flow(
            number=self.number,
            tenant=tenant,
            demand=self.demand,
            layers=self.layers,
            came_s=self.came_s,
            is_chunkwise=self.is_chunkwise,
        )
        flow.layer_index, flow.payload_index = self.layer_index, self.payload_index
        flow.layer_left_bytes, flow.left_bytes = self.layer_left_bytes, self.left_bytes
        flow.ahead_count = self.ahead_count
        return flow

    def share_tenant(self, request_count: int) -> None:
        """Give the request its part of the tenant's weight and cap: one `request_count`-th."""
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

    def dispatch(self) -> bool:
        """Let the next payload go. Returns whether that completes a layer."""
        self.ahead_count += 1
        self.dispatched_bytes = self.payload_bytes
        self.layer_left_bytes -= self.dispatched_bytes
        self.left_bytes -= self.dispatched_bytes
        self.payload_index += 1
        if self.payload_index < len(self.layers[self.layer_index].payloads):
            return False
        self.payload_index = 0
        self.layer_index += 1
        self.layer_left_bytes = 0 if self.is_over else self.layers[self.layer_index].nbytes
        return True
