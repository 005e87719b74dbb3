"""The tables of a config file that servers read, each with what the reference says of its keys."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from gateway.s3.routing import Operation
from objectcache.cli.config_internals import SchedulerInternals, said
from objectcache.cli.config_memory import MEMORY_BYTES
from objectcache.cli.config_values import ConfigError, Model, Rate, Size, shown
from storage_server.cache.policies.choice import Eviction
from storage_server.delivery.scheduler.flow import LinkTenant
from storage_server.delivery.scheduler.policies import Policy
from storage_server.delivery.scheduler.pool import PoolSettings
from storage_server.delivery.scheduler.profiles import ComputeProfile
from storage_server.delivery.scheduler.settings import SchedulerSettings
from storage_server.planning.durability import Durability
from storage_server.settings import CacheSettings, ColdReads, Dedup, RemoteDramSettings, UpstreamSettings, Write

UPSTREAM_VARIABLES = {
    "access_key": "OBJECTCACHE_UPSTREAM_ACCESS_KEY_ID",
    "secret_key": "OBJECTCACHE_UPSTREAM_SECRET_ACCESS_KEY",
    "region": "OBJECTCACHE_UPSTREAM_REGION",
}
ACTIONS = sorted({operation.action for operation in Operation})
NO_POOLS: Mapping[str, Any] = {}


class CredentialConfig(Model):
    """One `[[credentials]]` table."""

    ABOUT: ClassVar[str] = "any number; without any, the environment or a generated pair counts"
    access_key: Annotated[str, shown("KVREADER", min_length=3, max_length=128, pattern=r"^[\w.-]+$")]
    secret_key: Annotated[str, shown("at least 8 characters", min_length=8, max_length=128)]
    buckets: Annotated[tuple[str, ...], shown(["kv-*"], "shell patterns; default: every bucket")] = ("*",)
    actions: Annotated[tuple[str, ...], shown(["GetObject", "ListBucket", "RegisterAgent"], "default: everything")] = (
        "*",
    )

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

    ABOUT: ClassVar[str] = "docs/guides/security.md"
    region: Annotated[str, shown("us-east-1", "the region that signatures must name")] = "us-east-1"
    domains: Annotated[
        tuple[str, ...], shown(["s3.example.com"], "BUCKET.s3.example.com names a bucket; BUCKET.localhost always does")
    ] = ()
    tls_certificate: Annotated[Path | None, shown("/etc/cert.pem", "with its chain; together with tls_key: https")] = (
        None
    )
    tls_key: Annotated[Path | None, shown("/etc/key.pem")] = None
    allows_sigv2: Annotated[bool, shown(True, "presigned URLs of Version 2, for GET, HEAD and PUT of objects")] = True
    metrics_token: Annotated[
        str | None,
        shown(
            "a-long-random-text",
            "bearer token for GET /_objectcache/metrics (docs/reference/metrics.md)",
            min_length=16,
            max_length=256,
            pattern=r"^[A-Za-z0-9._~+/-]+=*$",
        ),
    ] = None


class StorageConfig(Model):
    """The `[storage]` table; sizes in bytes. Unset values keep the defaults of StorageSettings."""

    memory_bytes: Annotated[
        Size, shown("2GiB", "all buffers together, beside dram_bytes; half of it only in front of another service")
    ] = MEMORY_BYTES
    dram_bytes: Annotated[
        Size | None, shown("1GiB", "memory for chunks that are expected to be asked for again; 0: none")
    ] = None
    disk_bytes: Annotated[
        Size | None,
        shown(
            "200GB", "the most that all files of the data directory take; default: no bound (docs/guides/eviction.md)"
        ),
    ] = None
    eviction: Annotated[
        Eviction | None,
        shown(
            "reuse-value",
            "what leaves dram_bytes first and, with [upstream], the disk; or lru, lfu, s3-fifo, arc, cascade",
        ),
    ] = None
    durability: Annotated[
        Durability | None, shown("strict", 'or "relaxed", the default with [upstream] (docs/guides/durability.md)')
    ] = None
    dedup: Annotated[
        Dedup | None,
        shown("owner", 'whose equal bytes are stored once: "owner" of the buckets, "bucket" by bucket, "off"'),
    ] = None
    cold_reads: Annotated[
        ColdReads | None,
        shown("cached", 'chunks that no memory has are read through the page cache; "direct": past it'),
    ] = None
    theta_bytes: Annotated[
        Size | None,
        shown(
            "31MiB",
            "deliveries of fewer bytes go chunk-major when the descriptor says auto; `calibrate theta` measures it",
        ),
    ] = None
    ucx: Annotated[
        bool | tuple[str, ...] | None,
        shown(
            ["eth1"], "interfaces the ucx transport listens on; true: loopback; default: off (docs/guides/security.md)"
        ),
    ] = None
    ucx_maps_dram: Annotated[
        bool | None, shown(False, "true: ucx sends straight from the DRAM tier, which every ucx peer can then read")
    ] = None
    shm: Annotated[
        bool | tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...] | None,
        shown(True, "clients of this user and of root may hand memory in; [1000]: user 1000, too; false: nobody"),
    ] = None


class BucketConfig(Model):
    """One `[[buckets]]` table: a bucket that is a cache."""

    ABOUT: ClassVar[str] = "any number: buckets that are caches (docs/guides/eviction.md); not with [upstream]"
    name: Annotated[str, shown("kv-cache", pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")]
    capacity_bytes: Annotated[
        Size | None, shown("100GB", "the most that its objects take; default: what disk_bytes leaves")
    ] = None
    eviction: Annotated[Eviction, shown("reuse-value")] = Eviction.REUSE_VALUE
    ttl_s: Annotated[
        float | None, shown(86400.0, "objects are deleted this long after they were stored; default: never", gt=0)
    ] = None
    lossy: Annotated[
        Literal["off", "replace"],
        shown("off", '"replace": chunks are encoded before they would leave (docs/guides/compression.md)'),
    ] = "off"
    max_error: Annotated[
        float | None,
        shown(0.12, 'with "replace": the greatest error of such a chunk; default: no bound', ge=0, allow_inf_nan=False),
    ] = None
    max_loss: Annotated[float | None, shown(0.006, "and its greatest loss", ge=0, allow_inf_nan=False)] = None

    def cache(self) -> CacheSettings:
        """The settings. Raises ValueError."""
        replaces = self.lossy == "replace"
        return CacheSettings(
            bucket=self.name,
            capacity_bytes=self.capacity_bytes,
            eviction=self.eviction,
            ttl_s=self.ttl_s,
            replaces=replaces,
            max_error=self.max_error,
            max_loss=self.max_loss,
        )


class SchedulerConfig(Model):
    """The `[scheduler]` table; rates in bytes/s. Unset values keep the defaults of SchedulerSettings."""

    ABOUT: ClassVar[str] = "docs/guides/scheduling.md"
    link_bytes_per_s: Annotated[
        Rate | None, shown("12.5GB", "the rate that all descriptor GETs share; without it nothing is paced")
    ] = None
    margin_bytes_per_s: Annotated[
        Rate | None,
        shown("625MB", "how much more than s/c a request needs; `calibrate link` measures both", ge=0, le=1e15),
    ] = None

    def settings(
        self,
        internals: SchedulerInternals,
        tenants: Sequence[TenantConfig],
        profiles: Sequence[ComputeProfileConfig],
    ) -> SchedulerSettings:
        """The settings of the scheduler. Raises ValueError."""
        if twice := twice_in(each.access_key for each in tenants):
            raise ValueError(f"tenants: {twice} appears twice")
        further = said(internals)
        policy, rates = further.pop("policy"), further.pop("rates")
        of_pool: dict[str, Any] = {name: further.pop(name) for name in ("epoch_s_max", "gather_s") if name in further}
        if self.margin_bytes_per_s is not None:
            of_pool["margin_bytes_per_s"] = self.margin_bytes_per_s
        pool = PoolSettings(
            policy=None if policy == "slack" else Policy(policy),
            is_work_conserving=rates == "work-conserving",
            **of_pool,
        )
        return SchedulerSettings(
            link_bytes_per_s=self.link_bytes_per_s,
            pool=pool,
            tenants={each.access_key: each.tenant() for each in tenants},
            profiles=tuple(ComputeProfile(**each.model_dump()) for each in profiles),
            **further,
        )


class RemoteDramConfig(Model):
    """The `[upstream.remote_dram]` table: memory that hosts put together in a Mooncake Store."""

    ABOUT: ClassVar[str] = "docs/guides/upstream.md: chunks in memory that hosts put together in a Mooncake Store"
    endpoint: Annotated[str, shown("mooncake://10.0.0.1:50051")]
    host: Annotated[str | None, shown("127.0.0.1", "where other hosts reach this server's memory")] = None
    segment_bytes: Annotated[Size | None, shown(0, "memory of this host that joins the store", ge=0)] = None
    protocol: Annotated[str | None, shown("tcp", 'or "rdma"')] = None
    devices: Annotated[str | None, shown("mlx5_0", 'for "rdma"')] = None


class UpstreamConfig(Model):
    """The `[upstream]` table: the S3 service in front of which this server stands. The account may also come from the
    environment.
    """

    ABOUT: ClassVar[str] = "docs/guides/upstream.md: objects lie in another S3 service, and --data is a cache"
    endpoint: Annotated[
        str | None, shown("http://minio:9000", "or `--upstream`; file:///scratch/kv is a directory that servers share")
    ] = None
    access_key: Annotated[
        str | None, shown("MINIOKEY", "or OBJECTCACHE_UPSTREAM_ACCESS_KEY_ID; a directory needs no account")
    ] = None
    secret_key: Annotated[str | None, shown("at least one character", "or OBJECTCACHE_UPSTREAM_SECRET_ACCESS_KEY")] = (
        None
    )
    region: Annotated[str | None, shown("us-east-1", "or OBJECTCACHE_UPSTREAM_REGION")] = None
    write: Annotated[
        Write | None, shown("through", 'or "back": chunks are answered when they are durable here, and uploaded behind')
    ] = None
    chunk_revalidate_s: Annotated[
        float | None,
        shown(3600.0, "what others change there, past us, is seen within this time; 0: chunks never change", ge=0),
    ] = None
    read_bytes_per_s: Annotated[
        Rate | None, shown("2GB", "of a shared directory: all reads of this server; default: no limit", ge=1)
    ] = None
    remote_dram: RemoteDramConfig | None = None

    def settings(self, environment: Mapping[str, str], pools: Mapping[str, Any] = NO_POOLS) -> UpstreamSettings | None:
        """The settings, with `pools` of memory; None where no upstream service is named. Raises ConfigError."""
        values = said(self)
        if "endpoint" not in values:
            if values:
                raise ConfigError("[upstream]: endpoint: missing")
            return None
        endpoint = str(values["endpoint"])
        if not endpoint.startswith(("http://", "https://", "file:")):
            remedy = f"; for a directory that servers share: file://{endpoint}" if endpoint.startswith("/") else ""
            raise ConfigError(f"[upstream]: endpoint {endpoint}: must be http(s)://HOST:PORT or file:///PATH{remedy}")
        for name, variable in UPSTREAM_VARIABLES.items():
            if name not in values and environment.get(variable):
                values[name] = environment[variable]
        wanted = () if endpoint.startswith("file:") else ("access_key", "secret_key")
        missing = [name for name in wanted if name not in values]
        if missing:
            names = " and ".join(f"{name} (or {UPSTREAM_VARIABLES[name]})" for name in missing)
            raise ConfigError(f"[upstream]: {names}: missing")
        remote = values.pop("remote_dram", None)
        try:
            return UpstreamSettings(
                **values, **pools, remote_dram=None if remote is None else RemoteDramSettings(**remote)
            )
        except ValueError as error:
            raise ConfigError(f"[upstream]: {error}") from None


class TenantConfig(Model):
    """One `[[tenants]]` table: an access key's part of the link, and the loss of what it gets: the greatest error of a
    chunk, and the mean of all.
    """

    ABOUT: ClassVar[str] = "any number: access keys with a weight, a cap or a priority on the link, bounds of loss"
    access_key: Annotated[str, shown("KVREADER")]
    weight: Annotated[float, shown(0.5, "beside the 1 of others", gt=0)] = 1.0
    bytes_per_s_max: Annotated[Rate | None, shown("1GB", "default: no cap", ge=1)] = None
    priority: Annotated[int, shown(0, "0 to 7; a higher one goes first", ge=0, le=7)] = 0
    max_error: Annotated[
        float | None,
        shown(0.1, "of each chunk that comes encoded, whatever the client accepts (docs/guides/compression.md)", ge=0),
    ] = None
    max_loss: Annotated[float | None, shown(0.006, "and its greatest loss", ge=0)] = None
    error_budget: Annotated[
        float | None, shown(0.02, "the mean error of all chunks; default of all three: no bound", ge=0)
    ] = None

    def tenant(self) -> LinkTenant:
        """The tenant, for the scheduler."""
        return LinkTenant(self.access_key, self.weight, self.bytes_per_s_max, self.priority)


class ComputeProfileConfig(Model):
    """One `[[compute_profiles]]` table: the cost of a model's prefill, for descriptors that state no compute time."""

    ABOUT: ClassVar[str] = (
        "any number: a model's compute times, for descriptors and eviction; `calibrate model` writes them"
    )
    name: Annotated[str, shown("llama-3.1-8b")]
    num_layers: Annotated[int, shown(32, "the model is known by these two", ge=1, le=1024)]
    token_layer_bytes: Annotated[Size, shown(4096, ge=1)]
    request_us: Annotated[
        float,
        shown(0.0, "prefill of tokens h to P: request_us + token_us (P-h) + token_pair_us (P²-h²)/2", ge=0, le=3.6e9),
    ]
    token_us: Annotated[float, shown(60.0, ge=0, le=3.6e9)]
    token_pair_us: Annotated[float, shown(0.0035, ge=0, le=3.6e9)]
    hit_rate: Annotated[
        float, shown(0.5, "P = h / hit_rate, since a descriptor names cached tokens only", ge=0.001, le=1)
    ]


class ClusterConfig(Model):
    """The `[cluster]` table: how etcd is reached."""

    ABOUT: ClassVar[str] = "docs/guides/cluster.md; which cluster it is, `--cluster` says"
    etcd_user: Annotated[str | None, shown("objectcache")] = None
    etcd_password_file: Annotated[Path | None, shown("/run/secrets/etcd")] = None
    etcd_ca: Annotated[Path | None, shown("/etc/etcd/ca.pem", "for etcds://")] = None
    etcd_certificate: Annotated[Path | None, shown("/etc/etcd/us.pem")] = None
    etcd_key: Annotated[Path | None, shown("/etc/etcd/us.key")] = None

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


def twice_in(names: Iterable[str]) -> str | None:
    """The first name that is there more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)
