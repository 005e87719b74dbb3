"""Settings of the scheduler: plain values, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field

from descriptors.units import GIB
from storage_server.scheduler.flow import Tenant
from storage_server.scheduler.pool import PoolSettings
from storage_server.scheduler.profiles import ComputeProfile

TENANTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """`link_bytes_per_s` is what all deliveries of this server may use together; None leaves them unpaced, each as fast
    as its client takes it. Chunk-major deliveries share `chunkwise_fraction` of it, `chunkwise_slots` at a time, and
    all of it while no layer-major one is there; layer-major ones share the rest by `pool`.

    Descriptors are refused with SlowDown while `queued_bytes_max` are still to be sent. `tenants` are access keys that
    weigh otherwise than 1, have a cap or a priority. `profiles` stand in for compute times that a descriptor lacks.
    """

    link_bytes_per_s: float | None = None
    pool: PoolSettings = field(default_factory=PoolSettings)
    chunkwise_fraction: float = 0.1
    chunkwise_slots: int = 64
    queued_bytes_max: int = 1024 * GIB
    tenants: dict[str, Tenant] = field(default_factory=dict)
    profiles: tuple[ComputeProfile, ...] = ()

    def __post_init__(self) -> None:
        if self.link_bytes_per_s is not None and not 1 <= self.link_bytes_per_s <= 1e15:
            raise ValueError("link_bytes_per_s must be from 1 to 1e15")
        if not 1e-6 <= self.chunkwise_fraction <= 0.999:
            raise ValueError("chunkwise_fraction must be from 0.000001 to 0.999")
        if self.chunkwise_slots < 1:
            raise ValueError("chunkwise_slots must be at least 1")
        if self.queued_bytes_max < 1:
            raise ValueError("queued_bytes_max must be at least 1")
        if len(self.tenants) > TENANTS_MAX:
            raise ValueError(f"at most {TENANTS_MAX} tenants")
        for tenant in self.tenants.values():
            if not 0.001 <= tenant.weight <= 1000:
                raise ValueError(f"tenant {tenant.name}: the weight must be from 0.001 to 1000")

    def tenant(self, access_key: str) -> Tenant:
        """The access key's part of the link."""
        return self.tenants.get(access_key) or Tenant(access_key)
