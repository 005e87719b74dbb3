"""Configuration: a TOML file, environment variables and command-line options become checked settings.

Order for credentials: the config file's, then AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, then a generated pair kept
in a file only its owner can read.
"""

from __future__ import annotations

import difflib
import json
import os
import secrets
import string
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from descriptors.peer_auth import PeerSecrets
from descriptors.units import MIB
from gateway.app import GatewaySettings
from gateway.s3.credentials import Credential
from gateway.s3.routing import Operation
from objectcache.adapters.interfaces import LOOPBACK
from objectcache.cli.config_compression import CompressionConfig
from objectcache.cli.config_errors import told, unquoted
from objectcache.cli.config_orchestrator import ApiKeyConfig, EngineConfig, OrchestratorConfig
from objectcache.cli.config_values import ConfigError as ConfigError
from objectcache.cli.config_values import Model, Rate, Size
from storage_server.eviction.choice import Eviction
from storage_server.scheduler.flow import Tenant
from storage_server.scheduler.policies import Policy
from storage_server.scheduler.pool import PoolSettings
from storage_server.scheduler.profiles import ComputeProfile
from storage_server.scheduler.settings import SchedulerSettings
from storage_server.settings import (
    CacheSettings,
    ColdReads,
    Dedup,
    RemoteDramSettings,
    StorageSettings,
    UpstreamSettings,
    Write,
)
from storage_server.store.data.durability import Durability

PEER_SECRET_BYTES = 32
KEYS_TOLD = 8
"""A message names no more access keys than these."""
PEER_SECRETS_MAX = 8
UPSTREAM_VARIABLES = {
    "access_key": "OBJECTCACHE_UPSTREAM_ACCESS_KEY_ID",
    "secret_key": "OBJECTCACHE_UPSTREAM_SECRET_ACCESS_KEY",
    "region": "OBJECTCACHE_UPSTREAM_REGION",
}
ACTIONS = sorted({operation.action for operation in Operation})
TransportName = Literal["shm", "ucx", "http"]


class CredentialConfig(Model):
    """One `[[credentials]]` table."""

    access_key: Annotated[str, Field(min_length=3, max_length=128, pattern=r"^[\w.-]+$")]
    secret_key: Annotated[str, Field(min_length=8, max_length=128)]
    buckets: tuple[str, ...] = ("*",)
    actions: tuple[str, ...] = ("*",)

    @field_validator("actions")
    @classmethod
    def _has_known_actions(cls, actions: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in actions:
            if not any(fnmatchcase(action, pattern) for action in ACTIONS):
                near = difflib.get_close_matches(pattern, ACTIONS, 1, 0.5)
                remedy = f"did you mean {near[0]}?" if near else "actions are named as in S3, such as GetObject or Put*"
                raise ValueError(f"{pattern!r} is no action; {remedy}")
        return actions


class GatewayConfig(Model):
    """The `[gateway]` table."""

    region: str = "us-east-1"
    domains: tuple[str, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    body_idle_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    header_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    keepalive_timeout_s: Annotated[float, Field(gt=0)] = 75.0
    send_idle_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    connections_max: Annotated[int, Field(gt=0)] = 16_384
    document_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    allows_sigv2: bool = True
    document_bytes: Annotated[Size, Field(gt=0)] = 256 * MIB
    document_key_bytes: Annotated[Size, Field(gt=0)] = 64 * MIB
    metrics_token: Annotated[str, Field(min_length=16, max_length=256, pattern=r"^[A-Za-z0-9._~+/-]+=*$")] | None = None


class StorageConfig(Model):
    """The `[storage]` table; sizes in bytes. Unset values keep the defaults of StorageSettings."""

    theta_bytes: Size | None = None
    aggregation_bytes: Size | None = None
    staging_bytes: Size | None = None
    window_bytes: Size | None = None
    direct_payload_bytes: Size | None = None
    dram_bytes: Size | None = None
    cold_reads: ColdReads | None = None
    deliveries_max: int | None = None
    agents_max: int | None = None
    open_files_max: int | None = None
    resolved_keys_max: int | None = None
    resolved_bytes_max: Annotated[Size, Field(ge=0)] | None = None
    object_bytes_max: Size | None = None
    packed_bytes_max: Size | None = None
    buffer_bytes: Size | None = None
    rdma_buffer_bytes: Annotated[Size, Field(ge=0)] | None = None
    durability: Durability | None = None
    compact_interval_s: Annotated[float, Field(ge=0)] | None = None
    compact_live_fraction_max: float | None = None
    compact_bytes_per_s: Rate | None = None
    dedup: Dedup | None = None
    dedup_bytes_per_s: Rate | None = None
    lifecycle_interval_s: Annotated[float, Field(gt=0)] | None = None
    lifecycle_day_s: Annotated[float, Field(gt=0)] | None = None
    gather_threads: int | None = None
    stall_timeout_s: float | None = None
    least_bytes_per_s: Annotated[Rate, Field(ge=0)] | None = None
    ucx: bool | tuple[str, ...] | None = None
    ucx_maps_dram: bool | None = None
    shm: bool | tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...] | None = None
    disk_bytes: Size | None = None
    eviction: Eviction | None = None


class BucketConfig(Model):
    """One `[[buckets]]` table: a bucket that is a cache."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")]
    capacity_bytes: Size | None = None
    eviction: Eviction = Eviction.REUSE_VALUE
    ttl_s: Annotated[float, Field(gt=0)] | None = None
    lossy: Literal["off", "replace"] = "off"
    max_error: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    def cache(self) -> CacheSettings:
        """The settings. Raises ValueError."""
        replaces = self.lossy == "replace"
        return CacheSettings(self.name, self.capacity_bytes, self.eviction, self.ttl_s, replaces, self.max_error)


class SchedulerConfig(Model):
    """The `[scheduler]` table; rates in bytes/s. Unset values keep the defaults of SchedulerSettings."""

    link_bytes_per_s: Rate | None = None
    policy: Literal["slack", "equal", "kv-prop", "bw-prop", "stall-opt", "calibrated"] = "slack"
    rates: Literal["held", "work-conserving"] = "held"
    margin_bytes_per_s: Annotated[Rate, Field(ge=0, le=1e15)] | None = None
    epoch_s_max: Annotated[float, Field(gt=0, le=3600)] | None = None
    gather_s: Annotated[float, Field(ge=0, le=10)] | None = None
    chunkwise_fraction: float | None = None
    chunkwise_deliveries_max: int | None = None
    queued_bytes_max: Size | None = None

    def settings(self, tenants: Sequence[TenantConfig], profiles: Sequence[ComputeProfileConfig]) -> SchedulerSettings:
        """The settings of the scheduler. Raises ValueError."""
        if twice := _twice(each.access_key for each in tenants):
            raise ValueError(f"tenants: {twice} appears twice")
        of_pool = {"policy", "rates", "margin_bytes_per_s", "epoch_s_max", "gather_s"}
        pool = PoolSettings(
            policy=None if self.policy == "slack" else Policy(self.policy),
            is_work_conserving=self.rates == "work-conserving",
            **self.model_dump(include=of_pool - {"policy", "rates"}, exclude_none=True),
        )
        return SchedulerSettings(
            pool=pool,
            tenants={each.access_key: each.tenant() for each in tenants},
            profiles=tuple(ComputeProfile(**each.model_dump()) for each in profiles),
            **self.model_dump(exclude=of_pool, exclude_none=True),
        )


class RemoteDramConfig(Model):
    """The `[upstream.remote_dram]` table: memory that hosts put together in a Mooncake Store."""

    endpoint: str
    host: str | None = None
    segment_bytes: Annotated[Size, Field(ge=0)] | None = None
    protocol: str | None = None
    devices: str | None = None
    namespace: str | None = None


class UpstreamConfig(Model):
    """The `[upstream]` table: the S3 service in front of which this server stands. The account may also come from the
    environment.
    """

    endpoint: str | None = None
    access_key: str | None = None
    secret_key: str | None = None
    region: str | None = None
    connect_timeout_s: Annotated[float, Field(gt=0, le=60)] | None = None
    read_timeout_s: Annotated[float, Field(gt=0, le=600)] | None = None
    connections_max: Annotated[int, Field(gt=1, le=4096)] | None = None
    fetches_max: Annotated[int, Field(gt=0, le=4096)] | None = None
    uploads_max: Annotated[int, Field(gt=0, le=4096)] | None = None
    landing_bytes: Annotated[Size, Field(ge=0)] | None = None
    write: Write | None = None
    chunk_revalidate_s: Annotated[float, Field(ge=0)] | None = None
    poll_s: Annotated[float, Field(ge=0.01, le=3600)] | None = None
    read_bytes_per_s: Annotated[Rate, Field(ge=1)] | None = None
    segment_body_bytes_max: Annotated[Size, Field(ge=0)] | None = None
    remote_dram: RemoteDramConfig | None = None

    def settings(self, environment: Mapping[str, str]) -> UpstreamSettings | None:
        """The settings; None where no upstream service is named. Raises ConfigError."""
        said = self.model_dump(exclude_none=True)
        if "endpoint" not in said:
            if said:
                raise ConfigError("[upstream]: endpoint: missing")
            return None
        endpoint = str(said["endpoint"])
        if not endpoint.startswith(("http://", "https://", "file:")):
            remedy = f"; for a directory that servers share: file://{endpoint}" if endpoint.startswith("/") else ""
            raise ConfigError(f"[upstream]: endpoint {endpoint}: must be http(s)://HOST:PORT or file:///PATH{remedy}")
        for name, variable in UPSTREAM_VARIABLES.items():
            if name not in said and environment.get(variable):
                said[name] = environment[variable]
        wanted = () if endpoint.startswith("file:") else ("access_key", "secret_key")
        missing = [name for name in wanted if name not in said]
        if missing:
            names = " and ".join(f"{name} (or {UPSTREAM_VARIABLES[name]})" for name in missing)
            raise ConfigError(f"[upstream]: {names}: missing")
        remote = said.pop("remote_dram", None)
        try:
            return UpstreamSettings(**said, remote_dram=None if remote is None else RemoteDramSettings(**remote))
        except ValueError as error:
            raise ConfigError(f"[upstream]: {error}") from None


class TenantConfig(Model):
    """One `[[tenants]]` table: an access key's part of the link, and the loss of what it gets: the greatest error of a
    chunk, and the mean of all.
    """

    access_key: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    bytes_per_s_max: Annotated[Rate, Field(ge=1)] | None = None
    priority: Annotated[int, Field(ge=0, le=7)] = 0
    max_error: Annotated[float, Field(ge=0)] | None = None
    error_budget: Annotated[float, Field(ge=0)] | None = None

    def tenant(self) -> Tenant:
        """The tenant, for the scheduler."""
        return Tenant(self.access_key, self.weight, self.bytes_per_s_max, self.priority)


class ComputeProfileConfig(Model):
    """One `[[compute_profiles]]` table: the cost of a model's prefill, for descriptors that state no compute time."""

    name: str
    num_layers: Annotated[int, Field(ge=1, le=1024)]
    token_layer_bytes: Annotated[Size, Field(ge=1)]
    request_us: Annotated[float, Field(ge=0, le=3.6e9)]
    token_us: Annotated[float, Field(ge=0, le=3.6e9)]
    token_pair_us: Annotated[float, Field(ge=0, le=3.6e9)]
    hit_rate: Annotated[float, Field(ge=0.001, le=1)]


class CostsConfig(Model):
    """The costs of a delivery: seconds for each request, chunk and layer, and bytes/s for the rest."""

    request_s: Annotated[float, Field(ge=0)]
    chunk_s: Annotated[float, Field(ge=0)]
    layer_s: Annotated[float, Field(ge=0)]
    bytes_per_s: Annotated[Rate, Field(gt=0)]


class TransportCostsConfig(Model):
    """The costs of one transport in either order."""

    chunk_major: CostsConfig
    layer_major: CostsConfig


class LinkCalibrationConfig(Model):
    """The rate of one transport and the margin it needs, each with the least and the greatest measured value; in
    bytes/s.
    """

    measured_at: str
    machine: str
    commit: str = ""
    rounds: Annotated[int, Field(gt=0)]
    bytes_per_s: Annotated[Rate, Field(gt=0)]
    low_bytes_per_s: Annotated[Rate, Field(gt=0)]
    high_bytes_per_s: Annotated[Rate, Field(gt=0)]
    margin_bytes_per_s: Annotated[Rate, Field(ge=0)]
    margin_low_bytes_per_s: Annotated[Rate, Field(ge=0)]
    margin_high_bytes_per_s: Annotated[Rate, Field(ge=0)]


class CalibrationConfig(Model):
    """The `[calibration]` table, which `objectcache calibrate` writes: the measurements behind Theta, the costs by
    state of the chunks and by transport, and the links by transport. Theta or the links may be absent.
    """

    measured_at: str | None = None
    machine: str | None = None
    commit: str = ""
    rounds: Annotated[int, Field(gt=0)] | None = None
    theta_low_bytes: Annotated[Size, Field(ge=0)] | None = None
    theta_high_bytes: Annotated[Size, Field(ge=0)] | None = None
    theta_side: Literal["between", "below_all", "above_all"] | None = None
    dram: dict[TransportName, TransportCostsConfig] = Field(default_factory=dict)
    page_cache: dict[TransportName, TransportCostsConfig] = Field(default_factory=dict)
    cold: dict[TransportName, TransportCostsConfig] = Field(default_factory=dict)
    link: dict[TransportName, LinkCalibrationConfig] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_all_of_theta_or_none(self) -> Self:
        wanted = {"measured_at", "machine", "rounds", "theta_low_bytes", "theta_high_bytes", "theta_side"}
        missing = sorted(wanted - self.model_fields_set)
        if missing and self.model_fields_set - {"link"}:
            raise ValueError(f"{', '.join(missing)}: missing")
        return self


class ClusterConfig(Model):
    """The `[cluster]` table: how etcd is reached, and how long its leases are."""

    etcd_user: str | None = None
    etcd_password_file: Path | None = None
    etcd_ca: Path | None = None
    etcd_certificate: Path | None = None
    etcd_key: Path | None = None
    lease_s: Annotated[int, Field(ge=2, le=600)] = 10

    def account(self) -> tuple[str, str] | None:
        """etcd's user and password; None without a user. Raises ConfigError."""
        if (self.etcd_user is None) != (self.etcd_password_file is None):
            raise ConfigError("[cluster]: etcd_user and etcd_password_file go together")
        if self.etcd_user is None or self.etcd_password_file is None:
            return None
        try:
            return self.etcd_user, self.etcd_password_file.read_text().rstrip("\n")
        except OSError as error:
            raise ConfigError(f"[cluster]: etcd_password_file: {error.strerror}") from None


class Config(Model):
    """A whole config file."""

    gateway: GatewayConfig = GatewayConfig()
    storage: StorageConfig = StorageConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    tenants: tuple[TenantConfig, ...] = ()
    compute_profiles: tuple[ComputeProfileConfig, ...] = ()
    credentials: tuple[CredentialConfig, ...] = ()
    upstream: UpstreamConfig = UpstreamConfig()
    buckets: tuple[BucketConfig, ...] = ()
    compression: CompressionConfig = CompressionConfig()
    cluster: ClusterConfig = ClusterConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    engines: tuple[EngineConfig, ...] = ()
    api_keys: tuple[ApiKeyConfig, ...] = ()
    calibration: CalibrationConfig | None = None

    def gateway_settings(self) -> GatewaySettings:
        """The settings of a gateway. Raises ConfigError when sizes do not fit each other."""
        try:
            return GatewaySettings(**self.gateway.model_dump(exclude={"tls_certificate", "tls_key"}))
        except ValueError as error:
            raise ConfigError(f"[gateway]: {error}") from None

    def storage_settings(self, data_dir: Path) -> StorageSettings:
        """The settings of a storage server. Raises ConfigError when sizes do not fit each other."""
        chosen = self.storage.model_dump(exclude_none=True)
        if isinstance(chosen.get("ucx"), bool):
            chosen["ucx"] = (LOOPBACK,) if chosen["ucx"] else ()
        if isinstance(chosen.get("shm"), tuple):
            chosen |= {"shm": True, "shm_users": chosen["shm"]}
        scheduler = self.scheduler_settings()
        try:
            upstream = self.upstream.settings(os.environ)
            if upstream is not None and upstream.write is Write.THROUGH:  # what the cache loses, upstream has
                chosen.setdefault("durability", Durability.RELAXED)
            caches = tuple(bucket.cache() for bucket in self.buckets)
            return StorageSettings(
                data_dir=data_dir, scheduler=scheduler, upstream=upstream, caches=caches,
                compression=self.compression.settings(),
                max_errors={each.access_key: each.max_error for each in self.tenants if each.max_error is not None},
                error_budgets={
                    each.access_key: each.error_budget for each in self.tenants if each.error_budget is not None
                },
                **chosen,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(f"[storage]: {error}") from None

    def scheduler_settings(self) -> SchedulerSettings:
        """The settings of the scheduler. Raises ConfigError."""
        try:
            return self.scheduler.settings(self.tenants, self.compute_profiles)
        except ValueError as error:
            raise ConfigError(f"[scheduler]: {error}") from None


def load_config(path: Path | None) -> Config:
    """The file's configuration, or the defaults without one. Raises ConfigError."""
    if path is None:
        return Config()
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: it must be UTF-8, and byte {error.start} is not") from None
    try:
        return Config.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {unquoted(text, str(error)) or error}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {told(Config, error.errors(include_url=False, include_input=False))}") from None


def check_tenants(config: Config, credentials: Sequence[Credential]) -> None:
    """Raises ConfigError for a `[[tenants]]` table of nobody."""
    known = {each.access_key for each in credentials}
    for tenant in config.tenants:
        if tenant.access_key not in known:
            near = difflib.get_close_matches(tenant.access_key, known, 1, 0.6)
            remedy = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(sorted(known)[:KEYS_TOLD])}"
            raise ConfigError(f"[[tenants]]: {tenant.access_key} is no access key of this server; {remedy}")


def load_credentials(config: Config, environment: Mapping[str, str], file: Path) -> list[Credential]:
    """Credentials in the order the module's head gives; a new pair is printed once, to standard error."""
    if config.credentials:
        if twice := _twice(each.access_key for each in config.credentials):
            raise ConfigError(f"[[credentials]]: access_key {twice} appears twice")
        return [Credential(c.access_key, c.secret_key, c.buckets, c.actions) for c in config.credentials]
    access_key, secret_key = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if access_key and secret_key:
        return [Credential(access_key, secret_key)]
    if file.exists():
        try:
            stored = json.loads(file.read_text())
            return [Credential(stored["access_key"], stored["secret_key"])]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{file} is not a credentials file; remove it to have a new one made") from None
    letters = string.ascii_uppercase + string.digits
    access_key = "OC" + "".join(secrets.choice(letters) for _ in range(18))
    secret_key = secrets.token_urlsafe(30)
    _write_private(file, json.dumps({"access_key": access_key, "secret_key": secret_key}) + "\n")
    print(
        f"new credentials, kept in {file}:\n  AWS_ACCESS_KEY_ID={access_key}\n  AWS_SECRET_ACCESS_KEY={secret_key}",
        file=sys.stderr,
        flush=True,
    )
    return [Credential(access_key, secret_key)]


def credentials_from(config: Config, environment: Mapping[str, str], file: Path) -> str:
    """Where `load_credentials` finds them, for people."""
    if config.credentials:
        return "from the configuration"
    if environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"):
        return "from AWS_ACCESS_KEY_ID in the environment"
    return f"from {file}"


def load_peer_secrets(file: Path, *, create: bool) -> PeerSecrets:
    """The secrets that gateways and storage servers share, one a line: the first signs, each is accepted. Raises
    ConfigError when the file is absent, or a secret too short.
    """
    if not file.exists():
        if not create:
            raise ConfigError(f"{file}: no such file; copy the storage server's peer-secret there")
        _write_private(file, secrets.token_hex(PEER_SECRET_BYTES) + "\n")
    try:
        secrets_there = [line for line in map(bytes.strip, file.read_bytes().splitlines()) if line]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    if not secrets_there or min(map(len, secrets_there)) < PEER_SECRET_BYTES or len(secrets_there) > PEER_SECRETS_MAX:
        raise ConfigError(
            f"{file}: from 1 to {PEER_SECRETS_MAX} lines, each a secret of at least {PEER_SECRET_BYTES} characters"
        )
    return PeerSecrets(*secrets_there)


def _twice(names: Iterable[str]) -> str | None:
    """The first name that is there more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
