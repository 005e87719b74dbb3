"""Settings of a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from descriptors.descriptor import DESCRIPTOR_BYTES_MAX
from descriptors.units import MIB
from objectcache.adapters.deadlines import ConnectionLimits


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """`region` is the region that signatures must name. In a host name below one of `domains` (or localhost) the first
    labels name a bucket.

    A connection is closed when: no byte of an awaited body came for `body_idle_timeout_s`; the head of a request is not
    complete after `header_timeout_s`; no request came for `keepalive_timeout_s`; or the client took no byte of an
    answer for `send_idle_timeout_s`. Above `connections_max` idle connections and slow bodies end, or new
    connections are refused.

    With `allows_sigv2` presigned URLs with a Version 2 signature are accepted for GET, HEAD and PUT of objects, and
    HTML forms with such a signature.

    A document (a body that is parsed as a whole) must have arrived within `document_timeout_s`. All documents under way
    hold at most `document_bytes` of memory, those of one access key `document_key_bytes`.

    A request with `metrics_token` as a bearer token may read the metrics. With None only signed requests may.
    """

    region: str = "us-east-1"
    domains: tuple[str, ...] = ()
    body_idle_timeout_s: float = 60.0
    header_timeout_s: float = 30.0
    keepalive_timeout_s: float = 75.0
    send_idle_timeout_s: float = 60.0
    connections_max: int = 16_384
    document_timeout_s: float = 30.0
    allows_sigv2: bool = True
    document_bytes: int = 256 * MIB
    document_key_bytes: int = 64 * MIB
    metrics_token: str | None = field(default=None, repr=False)

    @property
    def connection_limits(self) -> ConnectionLimits:
        """The limits of each connection."""
        return ConnectionLimits(
            self.header_timeout_s, self.keepalive_timeout_s, self.send_idle_timeout_s, self.connections_max
        )

    def share_of(self, gateway_count: int) -> GatewaySettings:
        """The settings of one of `gateway_count` gateways that share one port: a part of the connections and of the
        memory for documents, so that all gateways together allow as much as these settings say. A share has room for
        one document of the greatest size, and for one connection.
        """
        key_bytes = max(DESCRIPTOR_BYTES_MAX, self.document_key_bytes // gateway_count)
        return replace(
            self,
            connections_max=max(1, self.connections_max // gateway_count),
            document_key_bytes=key_bytes,
            document_bytes=max(key_bytes, self.document_bytes // gateway_count),
        )

    def __post_init__(self) -> None:
        if not DESCRIPTOR_BYTES_MAX <= self.document_key_bytes <= self.document_bytes:
            raise ValueError(f"need {DESCRIPTOR_BYTES_MAX} <= document_key_bytes <= document_bytes")
