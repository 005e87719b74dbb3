"""The bytes that tenants with a cap have sent, in both modes together. Pure: `now` is an argument.

Example: a tenant with a cap of 100 bytes/s sends 100 bytes at 1 s. The meter counts from 0.95 s (`CATCH_UP_S` = 0.05),
so the tenant may send again at 1.95 s.
"""

from __future__ import annotations

import math

from storage_server.delivery.scheduler.flow import LinkTenant
from storage_server.delivery.scheduler.serial import CATCH_UP_S


class TenantMeter:
    """A tenant may send again when its cap has carried the bytes it sent. A cap that was left unused is made up for, up
    to `CATCH_UP_S`.
    """

    def __init__(self) -> None:
        self._free_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._free_s)

    def charge(self, tenant: LinkTenant, sent_bytes: int, now: float) -> None:
        """Count bytes that the tenant has sent."""
        if tenant.rate_max_bytes_per_s is not None:
            since_s = max(self._free_s.get(tenant.name, -math.inf), now - CATCH_UP_S)
            self._free_s[tenant.name] = since_s + sent_bytes / tenant.rate_max_bytes_per_s

    def free_s(self, tenant: LinkTenant) -> float:
        """The time from which the tenant may send."""
        return -math.inf if tenant.rate_max_bytes_per_s is None else self._free_s.get(tenant.name, -math.inf)

    def forget(self, now: float) -> None:
        """Drop the tenants whose past bytes have no effect any more."""
        self._free_s = {name: at_s for name, at_s in self._free_s.items() if at_s > now - CATCH_UP_S}
