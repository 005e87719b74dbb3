"""Settings of the scheduler: plain values, checked once.

Example: `link_bytes_per_s` = 1e9 and `chunkwise_fraction` = 0.1. While both sides have requests, chunk-major deliveries
share 0.1 GB/s, 64 at a time, and layer-major deliveries plan with 0.9 GB/s.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from descriptors.units import GIB
from storage_server.delivery.scheduler.flow import LinkTenant
from storage_server.delivery.scheduler.pool import PoolSettings
from storage_server.delivery.scheduler.profiles import ComputeProfile

TENANTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """`link_bytes_per_s` is the rate that all deliveries of this server share. With None they are not paced: each goes
    as fast as its client reads. Chunk-major deliveries, `chunkwise_deliveries_max` at a time, share
    `chunkwise_fraction` of the link, and all of it while there is no layer-major delivery. Layer-major deliveries share
    the rest as `pool` says.

    Descriptors are refused with SlowDown while `queued_bytes_max` bytes wait to be sent. `tenants` are the access keys
    with a weight other than 1, a cap or a priority. `profiles` give compute times to descriptors that state none.
    """

    link_bytes_per_s: float | None = None
    pool: PoolSettings = field(default_factory=PoolSettings)
    chunkwise_fraction: float = 0.1
    chunkwise_deliveries_max: int = 64
    queued_bytes_max: int = 1024 * GIB
    tenants: dict[str, LinkTenant] = field(default_factory=dict)
    profiles: tuple[ComputeProfile, ...] = ()

    def __post_init__(self) -> None:
        if self.link_bytes_per_s is not None and not 1 <= self.link_bytes_per_s <= 1e15:
            raise ValueError("link_bytes_per_s must be from 1 to 1e15")
        if not 1e-6 <= self.chunkwise_fraction <= 0.999:
            raise ValueError("chunkwise_fraction must be from 0.000001 to 0.999")
        if self.chunkwise_deliveries_max < 1:
            raise ValueError("chunkwise_deliveries_max must be at least 1")
        if self.queued_bytes_max < 1:
            raise ValueError("queued_bytes_max must be at least 1")
        if len(self.tenants) > TENANTS_MAX:
            raise ValueError(f"at most {TENANTS_MAX} tenants")
        for tenant in self.tenants.values():
            if not 0.001 <= tenant.weight <= 1000:
                raise ValueError(f"tenant {tenant.name}: the weight must be from 0.001 to 1000")

    def tenant(self, access_key: str) -> LinkTenant:
        """The access key's part of the link."""
        return self.tenants.get(access_key) or LinkTenant(access_key)
