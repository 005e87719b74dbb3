"""The tables of the config file that an orchestrator reads: `[orchestrator]`, `[[engines]]`, `[[api_keys]]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from objectcache.cli.config_values import Model, Size
from objectcache.orchestrator.rules.admission import AdmissionSettings, Tenant
from objectcache.orchestrator.rules.policies import PolicyName
from objectcache.orchestrator.settings import EngineSettings, Role

Url = Annotated[str, Field(pattern=r"^https?://[^/\\s]+/?$", max_length=512)]


class EngineConfig(Model):
    """One `[[engines]]` table."""

    url: Url
    name: Annotated[str, Field(max_length=128)] = ""
    role: Role = Role.BOTH
    events: Annotated[str, Field(max_length=512)] | None = None
    replay: Annotated[str, Field(max_length=512)] | None = None
    topic: Annotated[str, Field(max_length=128)] = ""
    requests_max: Annotated[int, Field(ge=1, le=65_536)] | None = None
    token_us: Annotated[float, Field(gt=0, lt=1e9)] | None = None

    @model_validator(mode="after")
    def _usable(self) -> EngineConfig:
        self.settings()
        return self

    def settings(self) -> EngineSettings:
        """The settings of the engine."""
        fields = self.model_dump(exclude={"role", "url"})
        return EngineSettings(url=self.url.rstrip("/"), role=self.role, **fields)


class ApiKeyConfig(Model):
    """One `[[api_keys]]` table: the key that a tenant's clients send, and the tenant's share."""

    key: Annotated[str, Field(min_length=8, max_length=256)]
    tenant: Annotated[str, Field(min_length=1, max_length=128)]
    weight: Annotated[float, Field(ge=0.001, le=1000)] = 1.0
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    active_max: Annotated[int, Field(ge=1)] | None = None

    def share(self) -> Tenant:
        """The tenant."""
        return Tenant(self.tenant, self.weight, self.priority, self.active_max)


class OrchestratorConfig(Model):
    """The `[orchestrator]` table. Unset values keep the defaults of OrchestratorSettings."""

    policy: PolicyName | None = None
    store: Url | None = None
    store_timeout_s: Annotated[float, Field(gt=0, le=10)] | None = None
    tokenizer: Path | None = None
    admin_token: Annotated[str, Field(min_length=16, max_length=256)] | None = None
    active_max: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    queue_max: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    deadline_s: Annotated[float, Field(gt=0, le=3600)] | None = None
    tenant_salts: bool | None = None
    body_bytes_max: Annotated[Size, Field(ge=1024)] | None = None
    bodies_bytes_max: Annotated[Size, Field(ge=1024)] | None = None
    connections_max: Annotated[int, Field(ge=1)] | None = None
    header_timeout_s: Annotated[float, Field(gt=0)] | None = None
    body_timeout_s: Annotated[float, Field(gt=0)] | None = None
    keepalive_timeout_s: Annotated[float, Field(gt=0)] | None = None
    send_idle_timeout_s: Annotated[float, Field(gt=0)] | None = None
    first_byte_timeout_s: Annotated[float, Field(gt=0)] | None = None
    stream_idle_timeout_s: Annotated[float, Field(gt=0)] | None = None
    poll_s: Annotated[float, Field(gt=0.01, le=60)] | None = None
    probe_timeout_s: Annotated[float, Field(gt=0.01, le=60)] | None = None
    token_cache_bytes: Annotated[Size, Field(ge=0)] | None = None
    response_cache_bytes: Annotated[Size, Field(ge=0)] | None = None
    response_cache_s: Annotated[float, Field(gt=0)] | None = None
    receipts_max: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    prefill_tokens_min: Annotated[int, Field(ge=1)] | None = None
    cors_origins: tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")], ...] | None = None
    drain_s: Annotated[float, Field(ge=0, le=3600)] | None = None

    def admission(self) -> AdmissionSettings:
        """The settings of admission."""
        wanted = {"active_max", "queue_max", "deadline_s"}
        return AdmissionSettings(**self.model_dump(include=wanted, exclude_none=True))

    def others(self) -> dict[str, object]:
        """The settings that are named as in OrchestratorSettings."""
        apart = {"store", "store_timeout_s", "active_max", "queue_max", "deadline_s"}
        return {**self.model_dump(exclude=apart, exclude_none=True)}
