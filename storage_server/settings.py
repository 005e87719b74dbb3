"""Settings of a storage server: plain values, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from descriptors.lifecycle import DAY_S
from descriptors.units import GIB, KIB, MIB
from storage_server.scheduler.settings import SchedulerSettings
from storage_server.store.durability import Durability


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """`theta_bytes` is the paper's threshold: payloads below it go chunk-major when the caller leaves the choice.

    `staging_bytes` bounds the memory of all deliveries together, `window_bytes` that of one; both are cut into slots of
    `aggregation_bytes`, the size of one payload on the wire. What goes over ucx has as much again. Payloads that need
    no staging, into shared memory or out of the DRAM tier, are of `direct_payload_bytes`. `dram_bytes` of memory keep
    chunks that are asked for repeatedly; 0 turns that off.

    One access key may have half of `deliveries_max` at once.

    Over http a client that takes less than `least_bytes_per_s` in `stall_timeout_s` in which it is waited for is cut
    off: it holds memory that others wait for.

    `ucx` are the interfaces the ucx transport listens on; without any it is off. Its process maps staging memory and,
    with `ucx_maps_dram`, the DRAM tier, for reading; every ucx peer can then read that, too.

    `rdma_buffer_bytes` holds the objects of the S3RDMA Buffer path, each whole; larger ones are declined.

    Objects and parts up to `packed_bytes_max` share segments. `buffer_bytes` bounds what plain S3 bodies hold in
    memory; what the index said of the last `resolved_keys_max` keys of descriptors stays there, in at most
    `resolved_bytes_max`: about 1 KiB for a chunk of 2 MiB, and 600 bytes for each further MiB.
    `adopt_index` goes on with an index that does not know all files: those are set aside.
    Lifecycle rules are carried out every `lifecycle_interval_s`; a shorter `lifecycle_day_s` is for trying them out.
    Deleted bytes of a segment are given back `punch_delay_s` later, for readers elsewhere.

    Segments of which at most `compact_live_fraction_max` is in use are rewritten, as are small ones together: looked
    for every `compact_interval_s` (0: never), at `compact_bytes_per_s`, and much slower while others use the store.
    """

    data_dir: Path
    theta_bytes: int = 16 * MIB
    aggregation_bytes: int = 4 * MIB
    staging_bytes: int = 128 * MIB
    window_bytes: int = 32 * MIB
    direct_payload_bytes: int = 16 * MIB
    dram_bytes: int = GIB
    deliveries_max: int = 512
    agents_max: int = 4096
    request_ids_max: int = 262_144
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
    lifecycle_interval_s: float = 3600.0
    lifecycle_day_s: float = DAY_S
    gather_threads: int = 2
    stall_timeout_s: float = 30.0
    least_bytes_per_s: float = 64 * KIB
    ucx: tuple[str, ...] = ()
    ucx_maps_dram: bool = False
    shm: bool = True
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)

    def __post_init__(self) -> None:
        if not 4096 <= self.aggregation_bytes <= self.window_bytes <= self.staging_bytes:
            raise ValueError("need 4096 <= aggregation_bytes <= window_bytes <= staging_bytes")
        if not 0 <= self.compact_live_fraction_max < 1:
            raise ValueError("compact_live_fraction_max must be at least 0 and less than 1")
        if self.compact_bytes_per_s <= 0:
            raise ValueError("compact_bytes_per_s is too small")
        for name in (
            "theta_bytes",
            "deliveries_max",
            "agents_max",
            "request_ids_max",
            "gather_threads",
            "packed_bytes_max",
            "direct_payload_bytes",
            "dram_bytes",
        ):
            if getattr(self, name) < (0 if name in ("theta_bytes", "dram_bytes") else 1):
                raise ValueError(f"{name} is too small")
