"""The `[internals]` tables: what the benches and tests of this project set. No promise holds for them, so no guide has
them, and each version may change them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from objectcache.cli.config_values import Model, Rate, Size


class GatewayInternals(Model):
    """Some of GatewaySettings."""

    connections_max: Annotated[int, Field(gt=0)] | None = None
    document_timeout_s: Annotated[float, Field(gt=0)] | None = None
    document_bytes: Annotated[Size, Field(gt=0)] | None = None
    document_key_bytes: Annotated[Size, Field(gt=0)] | None = None


class StorageInternals(Model):
    """Some of StorageSettings."""

    aggregation_bytes: Size | None = None
    window_bytes: Size | None = None
    direct_payload_bytes: Size | None = None
    packed_bytes_max: Size | None = None
    stall_timeout_s: float | None = None
    compact_interval_s: Annotated[float, Field(ge=0)] | None = None
    compact_live_fraction_max: float | None = None
    compact_bytes_per_s: Rate | None = None
    dedup_bytes_per_s: Rate | None = None


class SchedulerInternals(Model):
    """Policies and epochs of the papers (docs/design/scheduling.md), and bounds."""

    policy: Literal["slack", "equal", "kv-prop", "bw-prop", "stall-opt", "calibrated"] = "slack"
    rates: Literal["held", "work-conserving"] = "held"
    epoch_s_max: Annotated[float, Field(gt=0, le=3600)] | None = None
    gather_s: Annotated[float, Field(ge=0, le=10)] | None = None
    chunkwise_fraction: float | None = None
    chunkwise_deliveries_max: int | None = None
    queued_bytes_max: Size | None = None


class UpstreamInternals(Model):
    """Some of UpstreamSettings."""

    landing_bytes: Annotated[Size, Field(ge=0)] | None = None


class ClusterInternals(Model):
    """A storage server that dies leaves the cluster after `lease_s`."""

    lease_s: Annotated[int, Field(ge=2, le=600)] = 10


class OrchestratorInternals(Model):
    """How many requests may wait; None: QUEUED_FOR_ACTIVE times as many as run."""

    queue_max: Annotated[int, Field(ge=0, le=1_000_000)] | None = None


class InternalsConfig(Model):
    """All `[internals]` tables."""

    gateway: GatewayInternals = GatewayInternals()
    storage: StorageInternals = StorageInternals()
    scheduler: SchedulerInternals = SchedulerInternals()
    upstream: UpstreamInternals = UpstreamInternals()
    cluster: ClusterInternals = ClusterInternals()
    orchestrator: OrchestratorInternals = OrchestratorInternals()


def said(table: Model) -> dict[str, Any]:
    """The values that a table says, without defaults that are None."""
    return table.model_dump(exclude_none=True)
