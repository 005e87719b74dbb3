"""The tables of the config file that an orchestrator reads: `[orchestrator]`, `[[engines]]`, `[[api_keys]]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from objectcache.cli.config_values import Model, Size, shown
from objectcache.orchestrator.rules.admission import AdmissionSettings, Tenant
from objectcache.orchestrator.rules.policies import PolicyName
from objectcache.orchestrator.settings import EngineSettings, Role

QUEUED_FOR_ACTIVE = 4
Url = Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$", max_length=512)]


class EngineConfig(Model):
    """One `[[engines]]` table."""

    ABOUT: ClassVar[str] = "any number of engines"
    url: Annotated[Url, shown("http://10.0.0.1:8000")]
    name: Annotated[str, shown("a", "default: its URL", max_length=128)] = ""
    role: Annotated[Role, shown("both", 'or "prefill"')] = Role.BOTH
    events: Annotated[
        str | None,
        shown(
            "tcp://10.0.0.1:5557",
            "default: what it says itself; bind:tcp://… for one that connects, which needs a secret topic",
            max_length=512,
        ),
    ] = None
    replay: Annotated[str | None, shown("tcp://10.0.0.1:5558", max_length=512)] = None
    topic: Annotated[str, shown("kv", max_length=128)] = ""
    requests_max: Annotated[int | None, shown(256, "that it runs at once: vLLM's --max-num-seqs", ge=1, le=65_536)] = (
        None
    )

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

    ABOUT: ClassVar[str] = "any number: keys that tenants' clients send"
    key: Annotated[str, shown("sk-a-long-random-text", min_length=8, max_length=256)]
    tenant: Annotated[str, shown("search", min_length=1, max_length=128)]
    weight: Annotated[float, shown(1.0, ge=0.001, le=1000)] = 1.0
    priority: Annotated[int, shown(0, "a higher one goes first", ge=-100, le=100)] = 0
    active_max: Annotated[int | None, shown(64, "requests of the tenant that run at once; default: no bound", ge=1)] = (
        None
    )

    def share(self) -> Tenant:
        """The tenant."""
        return Tenant(self.tenant, self.weight, self.priority, self.active_max)


class OrchestratorConfig(Model):
    """The `[orchestrator]` table. Unset values keep the defaults of OrchestratorSettings."""

    ABOUT: ClassVar[str] = "docs/guides/orchestrator.md; only `objectcache orchestrator` reads these three tables"
    policy: Annotated[PolicyName | None, shown("ttft", "paper, round_robin, least_load, prefix_hash, kv_events")] = None
    store: Annotated[Url | None, shown("http://10.0.0.9:9000", "the ObjectCache that engines load from")] = None
    tokenizer: Annotated[Path | None, shown("/models/llama", "tokenizer files; without it the engines are asked")] = (
        None
    )
    admin_token: Annotated[
        str | None,
        shown("a-long-random-text", "for /_orchestrator; without it one is made", min_length=16, max_length=256),
    ] = None
    active_max: Annotated[
        int | None, shown(1024, "requests that run at once; four times as many wait,", ge=1, le=250_000)
    ] = None
    deadline_s: Annotated[float | None, shown(30.0, "and each for so long", gt=0, le=3600)] = None
    tenant_salts: Annotated[
        bool | None, shown(False, "true: tenants share no block and no chunk (by cache_salt, so forms get 501)")
    ] = None
    engine_timeout_s: Annotated[
        float | None,
        shown(600.0, "a stream in which so long nothing comes counts against its engine; others get 504", gt=0),
    ] = None
    response_cache_bytes: Annotated[
        Size | None, shown(0, "whole answers to identical deterministic requests; 0: none", ge=0)
    ] = None
    cors_origins: Annotated[
        tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")], ...] | None,
        shown(["https://chat.example"], 'web pages that may ask, or "*"; default: none'),
    ] = None
    drain_s: Annotated[
        float | None, shown(25.0, "how long requests that run may go on when it is told to stop", ge=0, le=3600)
    ] = None

    def admission(self) -> AdmissionSettings:
        """The settings of admission: four times as many requests may wait as run."""
        wanted = self.model_dump(include={"active_max", "deadline_s"}, exclude_none=True)
        if self.active_max is not None:
            wanted["queue_max"] = QUEUED_FOR_ACTIVE * self.active_max
        return AdmissionSettings(**wanted)

    def others(self) -> dict[str, object]:
        """The settings that are named as in OrchestratorSettings."""
        apart = {"store", "active_max", "deadline_s", "engine_timeout_s"}
        values = self.model_dump(exclude=apart, exclude_none=True)
        if self.engine_timeout_s is not None:
            values |= {"first_byte_timeout_s": self.engine_timeout_s, "stream_idle_timeout_s": self.engine_timeout_s}
        return values
