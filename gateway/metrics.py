"""The counters of a gateway's requests (descriptors.metrics.GATEWAY)."""

from __future__ import annotations

from descriptors import metrics
from descriptors.header_bytes import is_secret
from descriptors.tracing import Phase
from gateway.trace import RequestTrace
from objectcache.adapters.metrics import ProcessMetrics

BEARER = "Bearer "
_PHASES = (Phase.GATEWAY, Phase.STORAGE, Phase.TRANSFER)


class GatewayMeter:
    """Counts requests. The counts of all workers of a server are added up."""

    def __init__(self) -> None:
        self._metrics = ProcessMetrics(metrics.GATEWAY)

    def began(self) -> None:
        """Count a request that begins."""
        self._metrics.add(metrics.REQUESTS_ACTIVE, 1)

    def ended(self, trace: RequestTrace, status: int) -> None:
        """Count a request that is over; `status` is 0 where nothing was answered."""
        count, operation = self._metrics.add, trace.operation
        count(metrics.REQUESTS_ACTIVE, -1)
        count(metrics.REQUESTS, 1, operation, str(status))
        count(metrics.REQUEST_BYTES, trace.nbytes if status < 400 else 0, operation)
        if trace.code:
            count(metrics.REQUEST_ERRORS, 1, trace.code)
        for phase in _PHASES:
            count(metrics.REQUEST_PHASE_SECONDS, trace.phases.seconds(phase), phase.value)
        self._metrics.observe(metrics.REQUEST_SECONDS, trace.phases.total_s, operation)

    def text(self) -> bytes:
        """The counts in Prometheus' text format."""
        return self._metrics.text()


def is_bearer(authorization: str | None, token: str | None) -> bool:
    """Whether the Authorization header holds the bearer token."""
    if authorization is None or token is None or not authorization.startswith(BEARER):
        return False
    return is_secret(authorization.removeprefix(BEARER), token)
