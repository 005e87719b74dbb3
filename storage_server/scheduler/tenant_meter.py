"""What tenants with a cap have used of it, whichever way their bytes went. Pure: `now` is an argument."""

from __future__ import annotations

import math

from storage_server.scheduler.flow import Tenant
from storage_server.scheduler.serial import CATCH_UP_S


class TenantMeter:
    """A tenant may send again when its cap has carried what it sent; what it left unused is made up for, up to
    `CATCH_UP_S`.
    """

    def __init__(self) -> None:
        self._free_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._free_s)

    def charge(self, tenant: Tenant, sent_bytes: int, now: float) -> None:
        """The tenant has sent so much."""
        if tenant.rate_max_bytes_per_s is not None:
            since_s = max(self._free_s.get(tenant.name, -math.inf), now - CATCH_UP_S)
            self._free_s[tenant.name] = since_s + sent_bytes / tenant.rate_max_bytes_per_s

    def free_s(self, tenant: Tenant) -> float:
        """From when on the tenant may send."""
        return -math.inf if tenant.rate_max_bytes_per_s is None else self._free_s.get(tenant.name, -math.inf)

    def forget(self, now: float) -> None:
        """What has no effect any more is not kept."""
        self._free_s = {name: at_s for name, at_s in self._free_s.items() if at_s > now - CATCH_UP_S}
