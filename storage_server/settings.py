"""Settings of a storage server: plain values, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from urllib.parse import unquote, urlsplit

from descriptors.lifecycle import DAY_S
from descriptors.objects import CACHE_BYTES_MIN
from descriptors.units import GIB, KIB, MIB
from storage_server.cache.policies.choice import Eviction
from storage_server.cache.policies.utility import UtilitySettings
from storage_server.delivery.scheduler.settings import SchedulerSettings
from storage_server.planning.durability import Durability
from storage_server.planning.losses import LossTable

DISK_BYTES_MIN = 64 * MIB


class Write(Enum):
    """When a PUT of a chunk is answered: when upstream has it, or when it is durable here and is uploaded behind."""

    THROUGH = "through"
    BACK = "back"


class Dedup(Enum):
    """The scope in which equal bytes are stored once: all buckets of one owner, one bucket, or none."""

    OWNER = "owner"
    BUCKET = "bucket"
    OFF = "off"


class ColdReads(Enum):
    """How chunks are read that lie neither in the DRAM tier nor in the page cache."""

    CACHED = "cached"
    """Through the page cache."""
    DIRECT = "direct"
    """Past the page cache. Chunks that the DRAM tier is going to keep are read into its memory."""


@dataclass(frozen=True, slots=True)
class RemoteDramSettings:
    """Memory that hosts put together in a Mooncake Store, whose master is at `endpoint` (mooncake://HOST:PORT). This
    server gives `segment_bytes` of it, and is reached as `host` over `protocol` (tcp, or rdma with `devices`). Servers
    of one home use the same `namespace` (default: the address of the home), and those of other homes another.
    """

    endpoint: str
    host: str = "127.0.0.1"
    segment_bytes: int = 0
    protocol: str = "tcp"
    devices: str = ""
    namespace: str = ""

    def __post_init__(self) -> None:
        parts = urlsplit(self.endpoint)
        if parts.scheme != "mooncake" or not parts.hostname or parts.port is None or parts.path.strip("/"):
            raise ValueError(f"remote_dram: {self.endpoint!r} is no mooncake://HOST:PORT")
        if self.protocol not in ("tcp", "rdma"):
            raise ValueError(f"remote_dram: protocol: {self.protocol!r} is neither tcp nor rdma")


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """The way to another S3 service, and this server's account there.

    `connect_timeout_s` is for making a connection, `read_timeout_s` for the time between two reads of an answer, and
    for as long an answer may come too slowly. At most `connections_max` requests of callers are under way, of which
    `uploads_max` write chunks that were written `back`; `fetches_max` fetches of chunks are under way beside them.
    Chunks come into `landing_bytes` of memory, and into files behind the deliveries; with 0 they come straight into
    files. Changes that others make there past us are seen within `chunk_revalidate_s`; with 0 chunks never change.

    With an endpoint `file:///DIR` the home is a directory that many servers share, and no account is needed. Changes by
    other servers are looked for every `poll_s`, and reads keep to `read_bytes_per_s` (None: no limit). Bodies up to
    `segment_body_bytes_max` share files, others have files of their own.

    With `remote_dram`, chunks are looked for there before home is asked.
    """

    endpoint: str
    access_key: str = ""
    secret_key: str = ""
    region: str = "us-east-1"
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    connections_max: int = 128
    fetches_max: int = 64
    uploads_max: int = 8
    landing_bytes: int = GIB
    write: Write = Write.THROUGH
    chunk_revalidate_s: float = 3600.0
    poll_s: float = 1.0
    read_bytes_per_s: float | None = None
    segment_body_bytes_max: int = 16 * MIB
    remote_dram: RemoteDramSettings | None = None

    def __post_init__(self) -> None:
        if self.remote_dram is not None and not self.landing_bytes:
            raise ValueError("upstream: remote_dram needs landing_bytes")
        parts = urlsplit(self.endpoint)
        if parts.scheme == "file":
            if parts.netloc or parts.query or not parts.path.startswith("/"):
                raise ValueError(f"upstream: {self.endpoint!r} is no file:///DIRECTORY")
            return
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/") or parts.query:
            raise ValueError(f"upstream: {self.endpoint!r} is no http:// or https:// address of an S3 service")
        if not self.access_key or not self.secret_key:
            raise ValueError("upstream: an access key and a secret key are needed")
        if not 0 < self.fetches_max < self.fetches_max + self.uploads_max < self.connections_max:
            raise ValueError("upstream: need 0 < fetches_max, 0 < uploads_max and a sum below connections_max")

    @property
    def directory(self) -> Path | None:
        """The shared directory; None where the home is an S3 service."""
        parts = urlsplit(self.endpoint)
        return Path(unquote(parts.path)) if parts.scheme == "file" else None


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """A bucket whose objects may be evicted; for the bucket None all objects of the directory may be. They take at most
    `capacity_bytes` (None: what the directory may take), and are deleted `ttl_s` after they were stored (None: never).

    Where the bucket `replaces`, chunks whose PUT declared their layout are encoded before they would leave, with an
    error of at most `max_error` and a loss of at most `max_loss` (None: any). The encoded chunk is an object in place
    of the exact one.
    """

    bucket: str | None
    capacity_bytes: int | None = None
    eviction: Eviction = Eviction.REUSE_VALUE
    ttl_s: float | None = None
    replaces: bool = False
    max_error: float | None = None
    max_loss: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_error", "max_loss"):
            if getattr(self, name) is not None and not self.replaces:
                raise ValueError(f"buckets: {self.bucket}: {name} goes with lossy")
        if self.capacity_bytes is not None and self.capacity_bytes < CACHE_BYTES_MIN:
            raise ValueError(f"buckets: {self.bucket}: capacity_bytes must be at least {CACHE_BYTES_MIN}")
        if self.ttl_s is not None and self.ttl_s <= 0:
            raise ValueError(f"buckets: {self.bucket}: ttl_s must be greater than 0")


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """The settings of one storage server.

    `theta_bytes` is the paper's threshold Θ: a delivery of fewer bytes goes chunk-major when the caller leaves the
    choice. The default was measured (docs/design/figures.md).

    `staging_bytes` bounds the staging memory of all deliveries together, `window_bytes` that of one delivery. Both are
    cut into slots of `aggregation_bytes`, the size of one payload on the wire. ucx has a second pool of the same size.
    Payloads that need no staging, because they go into shared memory or come from the DRAM tier, have
    `direct_payload_bytes`. `dram_bytes` of memory keep chunks; `eviction` says which. 0 turns this tier off.

    `cold_reads` says whether chunks that no memory has are read through the page cache, or past it straight into the
    DRAM tier and the payload.

    One access key may have half of `deliveries_max` at once.

    An http client that takes fewer than `least_bytes_per_s` during `stall_timeout_s` is cut off, because it holds
    memory that others wait for.

    With `upstream` objects lie in another S3 service, and `data_dir` is a cache, of which `eviction` says what leaves.
    All files under `data_dir` together take at most `disk_bytes`; None is no bound or, in front of another service,
    nine tenths of what is free at the start. The buckets of `caches` are caches, too; other buckets are not evicted.

    With `compression` the DRAM tier keeps some chunks encoded, for readers that take them; `max_errors` and
    `max_losses` bound the error and the loss of each chunk that an access key gets, whatever it accepts, and
    `error_budgets` the mean error of all its chunks. Losses are those of `losses`.

    `ucx` are the interfaces that the ucx transport listens on; without any, ucx is off. Its process maps staging memory
    and, with `ucx_maps_dram`, also the DRAM tier, for reading; every ucx peer can then read the DRAM tier.

    `rdma_buffer_bytes` of memory hold the objects of the S3RDMA Buffer path, each whole. One access key has at most
    half of it, and larger objects are declined.

    Objects and parts up to `packed_bytes_max` share segments. `buffer_bytes` bounds the memory of plain S3 bodies. The
    index answers for the last `resolved_keys_max` keys of descriptors are kept, in at most `resolved_bytes_max`: about
    1 KiB for a chunk of 2 MiB, and 600 bytes for each further MiB.
    With `adopt_index` the server starts with an index that lacks some of the files, and sets those files aside.
    Lifecycle rules are carried out every `lifecycle_interval_s`; a `lifecycle_day_s` below 86,400 is for trying them
    out. Deleted bytes of a segment are given back after `punch_delay_s`, because worker processes may still read them.

    Segments of which at most `compact_live_fraction_max` is in use are rewritten, and small segments are joined. The
    server looks for them every `compact_interval_s` (0: never), and copies `compact_bytes_per_s`, or much less while
    others use the store. `dedup` says whose equal bytes are stored once; they are compared at `dedup_bytes_per_s`, or
    at much less while others use the store.
    """

    data_dir: Path
    theta_bytes: int = 31 * MIB
    aggregation_bytes: int = 4 * MIB
    staging_bytes: int = 128 * MIB
    window_bytes: int = 32 * MIB
    direct_payload_bytes: int = 16 * MIB
    dram_bytes: int = GIB
    compression: UtilitySettings | None = None
    losses: LossTable = field(default_factory=LossTable)
    max_errors: Mapping[str, float] = field(default_factory=dict)
    max_losses: Mapping[str, float] = field(default_factory=dict)
    error_budgets: Mapping[str, float] = field(default_factory=dict)
    cold_reads: ColdReads = ColdReads.CACHED
    deliveries_max: int = 512
    agents_max: int = 4096
    open_files_max: int = 8192
    resolved_keys_max: int = 65_536
    resolved_bytes_max: int = 64 * MIB
    adopt_index: bool = False
    object_bytes_max: int = 5 * GIB
    packed_bytes_max: int = 8 * MIB
    buffer_bytes: int = 128 * MIB
    rdma_buffer_bytes: int = 64 * MIB
    durability: Durability = Durability.STRICT
    punch_delay_s: float = 0.0
    compact_interval_s: float = 60.0
    compact_live_fraction_max: float = 0.5
    compact_bytes_per_s: float = 64 * MIB
    dedup: Dedup = Dedup.OWNER
    dedup_bytes_per_s: float = 256 * MIB
    lifecycle_interval_s: float = 3600.0
    lifecycle_day_s: float = DAY_S
    gather_threads: int = 2
    stall_timeout_s: float = 30.0
    least_bytes_per_s: float = 64 * KIB
    ucx: tuple[str, ...] = ()
    ucx_maps_dram: bool = False
    shm: bool = True
    shm_users: tuple[int, ...] = ()
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    upstream: UpstreamSettings | None = None
    disk_bytes: int | None = None
    eviction: Eviction = Eviction.REUSE_VALUE
    caches: tuple[CacheSettings, ...] = ()

    def __post_init__(self) -> None:
        if not 4096 <= self.aggregation_bytes <= self.window_bytes <= self.staging_bytes:
            raise ValueError("need 4096 <= aggregation_bytes <= window_bytes <= staging_bytes")
        if not 0 <= self.compact_live_fraction_max < 1:
            raise ValueError("compact_live_fraction_max must be at least 0 and less than 1")
        if self.compact_bytes_per_s <= 0:
            raise ValueError("compact_bytes_per_s is too small")
        if self.dedup_bytes_per_s <= 0:
            raise ValueError("dedup_bytes_per_s is too small")
        if self.disk_bytes is not None and self.disk_bytes < DISK_BYTES_MIN:
            raise ValueError(f"disk_bytes must be at least {DISK_BYTES_MIN}")
        writes_back = self.upstream is not None and self.upstream.write is Write.BACK
        if writes_back and self.durability is Durability.RELAXED:
            raise ValueError("durability: with write = back the only copy may be here for a while: strict is needed")
        if self.caches and self.upstream is not None:
            raise ValueError("buckets: in front of another S3 service, disk_bytes bounds the cache of all buckets")
        if self.compression is None and any(cache.replaces for cache in self.caches):
            raise ValueError("buckets: lossy needs [compression], which says in which codecs")
        if len({cache.bucket for cache in self.caches}) < len(self.caches):
            raise ValueError("buckets: a bucket appears twice")
        for name in (
            "theta_bytes",
            "deliveries_max",
            "agents_max",
            "gather_threads",
            "packed_bytes_max",
            "direct_payload_bytes",
            "dram_bytes",
        ):
            if getattr(self, name) < (0 if name in ("theta_bytes", "dram_bytes") else 1):
                raise ValueError(f"{name} is too small")
