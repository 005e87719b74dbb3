"""Every metric of `GET /_objectcache/metrics`, as values. docs/reference/metrics.md lists them for people.

Names are `objectcache_<subsystem>_<name>_<unit>`, and counters end in `_total`. No label may hold a value that a client
chooses (a key, an access key): a client could make any number of series, and could read about other clients. Buckets
that are caches are named, at most descriptors.status.CACHES_MAX of them: whoever reads metrics may read all buckets.

    objectcache_gateway_requests_total{operation="get_object",status="200"} 17
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""The upper bounds of the buckets of a duration, in seconds."""

ERRORS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
"""The upper bounds of the buckets of a relative error."""

LOSSES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""The upper bounds of the buckets of a loss, in nats a token."""


class MetricKind(Enum):
    """The kinds of Prometheus metrics that are used here."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """`meaning` is one sentence. `labels` are the names of its labels, `buckets` a histogram's upper bounds."""

    name: str
    kind: MetricKind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"objectcache_{name}", MetricKind.COUNTER, meaning, labels)


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"objectcache_{name}", MetricKind.GAUGE, meaning, labels)


def _seconds(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"objectcache_{name}", MetricKind.HISTOGRAM, meaning, labels, SECONDS)


REQUESTS = _counter("gateway_requests_total", "S3 requests that were answered.", "operation", "status")
REQUEST_SECONDS = _seconds(
    "gateway_request_duration_seconds", "Time from a request's head to the end of its answer.", "operation"
)
REQUEST_ERRORS = _counter("gateway_errors_total", "Requests that were answered with this error.", "code")
REQUEST_PHASE_SECONDS = _counter(
    "gateway_phase_seconds_total", "Time of requests in the gateway, the storage and the transfer.", "phase"
)
REQUEST_BYTES = _counter("gateway_moved_bytes_total", "Bytes of objects and prefixes that were moved.", "operation")
REQUESTS_ACTIVE = _gauge("gateway_active_requests", "Requests that are being answered.")
GATEWAY = (REQUESTS, REQUEST_SECONDS, REQUEST_ERRORS, REQUEST_PHASE_SECONDS, REQUEST_BYTES, REQUESTS_ACTIVE)
"""The metrics of each gateway process; those of the workers of one server are added up."""

HEDGED_PORTIONS = _counter("cluster_hedged_portions_total", "Slow portions that a second member was asked for.")
HEDGES_WON = _counter("cluster_won_portions_total", "Those that the second member brought first.")
HEDGED_BYTES = _counter("cluster_hedged_bytes_total", "Bytes that this may have cost besides, at most.")
CLUSTER = (HEDGED_PORTIONS, HEDGES_WON, HEDGED_BYTES)
"""The metrics of a gateway over a cluster."""

DELIVERIES = _counter(
    "delivery_requests_total", "Deliveries that have ended: done, or with this error.", "transport", "mode", "outcome"
)
DELIVERY_SECONDS = _seconds(
    "delivery_duration_seconds", "Time of a delivery from its admission to its last byte.", "transport"
)
FIRST_LAYER_SECONDS = _seconds(
    "delivery_first_layer_seconds", "Time until a layer-major delivery's first layer was handed over.", "transport"
)
FIRST_LAYER_PHASE_SECONDS = _counter(
    "delivery_first_layer_phase_seconds_total",
    "The same time in planning, waiting, gathering and the transport.",
    "transport",
    "phase",
)
DELIVERY_PHASE_SECONDS = _counter(
    "delivery_phase_seconds_total", "Time of deliveries in planning, waiting, gathering and the transport.", "phase"
)
DELIVERY_BYTES = _counter("delivery_sent_bytes_total", "Bytes that deliveries brought.", "transport")
DELIVERIES_ACTIVE = _gauge("delivery_active_requests", "Deliveries and object moves under way.")
STAGING_USED = _gauge("delivery_staging_used_bytes", "Staging memory of http deliveries that is in use.")
STAGING_SIZE = _gauge("delivery_staging_size_bytes", "Staging memory of http deliveries.")

LOOKUPS = _counter("lookup_requests_total", "Prefix lookups.")
LOOKUP_ASKED = _counter("lookup_asked_chunks_total", "Chunks that lookups named.")
LOOKUP_MATCHED = _counter("lookup_matched_chunks_total", "Chunks that lookups found, from the first without a gap.")

LINK_RATE = _gauge("scheduler_link_bytes_per_second", "The link's rate as configured; 0 where it is not limited.")
LINK_QUEUED = _gauge("scheduler_queued_bytes", "Bytes of deliveries that have not been sent.")
FLOWS_ACTIVE = _gauge("scheduler_active_flows", "Deliveries that the link serves.", "mode")
FLOWS_WAITING = _gauge("scheduler_waiting_flows", "Deliveries that wait for the link.", "mode")
EPOCHS = _counter("scheduler_epochs_total", "Epochs that have begun.")

DRAM_SIZE = _gauge("dram_size_bytes", "Memory of the DRAM tier.")
DRAM_RESIDENT = _gauge("dram_resident_bytes", "Memory of the DRAM tier that extents lie in.")
DRAM_EXTENTS = _gauge("dram_resident_extents", "Extents in the DRAM tier.")
DRAM_HITS = _counter("dram_hit_extents_total", "Extents of deliveries that lay in the DRAM tier.")
DRAM_MISSES = _counter("dram_missed_extents_total", "Extents of deliveries that had to be read from files.")
DRAM_EVICTED = _counter("dram_evicted_extents_total", "Extents that were evicted for others.")
DRAM_FORMS = _gauge("dram_form_extents", "Extents in the DRAM tier, by their form.", "codec")
DRAM_ENCODED = _counter("dram_encoded_bytes_total", "Bytes of exact chunks that were encoded for the DRAM tier.")
DRAM_ENCODING = _counter("dram_encoding_seconds_total", "Time that this took.")
DELIVERY_FORMS = _counter(
    "delivery_form_chunks_total", "Chunks that went to readers that accept codecs, by their form.", "codec"
)
DELIVERY_ERROR = Metric(
    "objectcache_delivery_worst_error_ratio",
    MetricKind.HISTOGRAM,
    "The error of the worst layer of deliveries to readers that accept codecs.",
    (),
    ERRORS,
)
DELIVERY_LOSS = Metric(
    "objectcache_delivery_worst_loss_nats",
    MetricKind.HISTOGRAM,
    "The greatest calibrated loss of a chunk in these deliveries; 0 where none is known.",
    ("basis",),
    LOSSES,
)

STORE_FREE = _gauge("store_free_bytes", "Free space of the data directory's file system.")
STORE_USED = _gauge("store_used_bytes", "Space that the files of the data directory take.")
STORE_BOUND = _gauge("store_bound_bytes", "The most that they may take (`disk_bytes`); 0 without a bound.")
STORE_EVICTED = _counter("store_evicted_objects_total", "Objects of caches that were evicted.")
STORE_EVICTED_BYTES = _counter("store_evicted_bytes_total", "Bytes of these objects.")
STORE_REPLACED = _counter("store_replaced_objects_total", "Chunks that were replaced by encoded ones.")
STORE_REPLACED_BYTES = _counter("store_replaced_bytes_total", "Bytes by which these are smaller.")
STORE_REPLACING = _counter("store_replacing_seconds_total", "Time that encoding them took.")
STORE_UNHELD = _counter(
    "store_unheld_objects_total", "Objects whose pins or leases had no effect: others hold half a cache."
)
CACHE_USED = _gauge("cache_used_bytes", "Bytes of the objects and open uploads of a bucket that is a cache.", "bucket")
CACHE_BOUND = _gauge("cache_bound_bytes", "The most that they may be; 0 where only `disk_bytes` bounds them.", "bucket")
CACHE_OBJECTS = _gauge("cache_stored_objects", "Objects of the bucket.", "bucket")
CACHE_READ = _counter("cache_read_bytes_total", "Bytes of its objects that were read.", "bucket")
CACHE_EVICTED = _counter("cache_evicted_objects_total", "Objects of the bucket that were evicted.", "bucket")
CACHE_EVICTED_BYTES = _counter("cache_evicted_bytes_total", "Bytes of these objects.", "bucket")
CACHE_AGE = _gauge("cache_eviction_age_seconds", "How long the object that left last had not been used.", "bucket")
UPSTREAM_FETCHING = _gauge("upstream_fetching_chunks", "Chunks on their way from the service upstream.")
UPSTREAM_LANDED = _gauge("upstream_landed_bytes", "Memory that chunks lie in until they are in files.")
UPSTREAM_FETCHED = _counter("upstream_fetched_bytes_total", "Bytes of chunks that came from there.")
UPSTREAM_PASSED = _counter(
    "upstream_passed_bytes_total", "Bytes of chunks that the cache had no room for, as often as they were read there."
)
UPSTREAM_STALE = _counter("upstream_stale_chunks_total", "Cached chunks that others had changed or deleted there.")
UPSTREAM_FAILED = _counter("upstream_failed_requests_total", "Requests that the service did not answer, or was busy.")
UPSTREAM_UNREAD = _gauge("upstream_unread_journals", "Journals of a shared directory that break off.")
UPSTREAM_BAD_RECORDS = _counter(
    "upstream_bad_records_total", "Records of a shared directory's journals that make no sense and were passed over."
)
UPSTREAM_DIRTY = _gauge("upstream_dirty_chunks", "Chunks that were written back and are not upstream yet.")
UPSTREAM_DIRTY_BYTES = _gauge("upstream_dirty_bytes", "Bytes of these chunks.")
UPSTREAM_DIRTY_AGE = _gauge("upstream_dirty_age_seconds", "The age of the oldest of them; 0 without any.")
UPSTREAM_REFUSED = _gauge("upstream_refused_chunks", "Those that the service has refused. The log says why.")
REMOTE_JOINED = _gauge("remote_dram_joined_stores", "Mooncake Stores that were joined: 0 or 1.")
REMOTE_HITS = _counter("remote_dram_hit_chunks_total", "Chunks that came from remote DRAM.")
REMOTE_MISSES = _counter("remote_dram_missed_chunks_total", "Chunks that were looked for there, and came from home.")
REMOTE_READ = _counter("remote_dram_read_bytes_total", "Bytes of chunks that came from there.")
REMOTE_ADMITTED = _counter("remote_dram_admitted_bytes_total", "Bytes of chunks that this server has put there.")
REMOTE_FAILED = _counter("remote_dram_failed_requests_total", "Calls of Mooncake Store that failed, or took too long.")
FORMER_HITS = _counter("former_keeper_hit_chunks_total", "Chunks that came out of their former keepers' caches.")
FORMER_MISSES = _counter("former_keeper_missed_chunks_total", "Chunks that were looked for there, and came from home.")
FORMER_READ = _counter("former_keeper_read_bytes_total", "Bytes of chunks that came from there.")
DOWNLINK_ASKED = _counter("downlink_asked_requests_total", "Shares of clients' downlinks that members were asked for.")
DOWNLINK_FAILED = _counter("downlink_failed_requests_total", "Of these, those that were not answered in time.")
STORE_OPEN_FILES = _gauge("store_open_files", "Data files that are open.")
STORE_PINNED_FILES = _gauge("store_pinned_files", "Data files that are being read.")
STORE_COMMITS = _counter("store_commits_total", "Transactions of the index.")
STORE_CHANGES = _counter("store_changes_total", "Changes in those transactions: puts, copies, deletes and others.")
STORE_COMPACTED = _counter("store_compacted_bytes_total", "Bytes that compaction has rewritten.")
STORE_NAMED = _gauge(
    "store_named_bytes",
    "Bytes of all objects and parts, copies counted each time; read every 30 s at most.",
)
STORE_STORED = _gauge("store_stored_bytes", "Bytes that lie in the data directory for them: each copy once.")
STORE_SHARED = _counter("store_shared_bytes_total", "Space that deduplication has given back.")
STORE_DAMAGED = _gauge("store_damaged_objects", "Objects that were found damaged and are still stored.")

AGENTS = _gauge("agents_registered_agents", "Agents that are registered.")
AGENT_REGIONS = _gauge("agents_registered_regions", "Regions of those agents.")
UCX_IN_FLIGHT = _gauge("ucx_in_flight_transfers", "Reads and writes of clients' memory in flight; 0 where ucx is off.")
UCX_STARTS = _counter("ucx_starts_total", "Starts of the ucx process; more than one means that it ended by itself.")

STORAGE = (
    DELIVERIES, DELIVERY_SECONDS, FIRST_LAYER_SECONDS, FIRST_LAYER_PHASE_SECONDS, DELIVERY_PHASE_SECONDS,
    DELIVERY_BYTES, DELIVERIES_ACTIVE, STAGING_USED, STAGING_SIZE, LOOKUPS, LOOKUP_ASKED, LOOKUP_MATCHED, LINK_RATE,
    LINK_QUEUED, FLOWS_ACTIVE, FLOWS_WAITING, EPOCHS, DRAM_SIZE, DRAM_RESIDENT, DRAM_EXTENTS, DRAM_HITS, DRAM_MISSES,
    DRAM_EVICTED, DRAM_FORMS, DRAM_ENCODED, DRAM_ENCODING, DELIVERY_FORMS, DELIVERY_ERROR, DELIVERY_LOSS, STORE_FREE,
    STORE_USED, STORE_BOUND, STORE_EVICTED, STORE_EVICTED_BYTES, STORE_REPLACED, STORE_REPLACED_BYTES, STORE_REPLACING,
    STORE_UNHELD, CACHE_USED, CACHE_BOUND, CACHE_OBJECTS, CACHE_READ, CACHE_EVICTED, CACHE_EVICTED_BYTES, CACHE_AGE,
    UPSTREAM_FETCHING, UPSTREAM_LANDED, UPSTREAM_FETCHED, UPSTREAM_PASSED, UPSTREAM_STALE,
    UPSTREAM_FAILED, UPSTREAM_UNREAD, UPSTREAM_BAD_RECORDS, UPSTREAM_DIRTY, UPSTREAM_DIRTY_BYTES, UPSTREAM_DIRTY_AGE,
    UPSTREAM_REFUSED, REMOTE_JOINED, REMOTE_HITS, REMOTE_MISSES, REMOTE_READ, REMOTE_ADMITTED, REMOTE_FAILED,
    FORMER_HITS, FORMER_MISSES, FORMER_READ, STORE_OPEN_FILES, STORE_PINNED_FILES, STORE_COMMITS, STORE_CHANGES,
    STORE_COMPACTED, STORE_NAMED, STORE_STORED, STORE_SHARED, STORE_DAMAGED, AGENTS, AGENT_REGIONS, UCX_IN_FLIGHT,
    UCX_STARTS, DOWNLINK_ASKED, DOWNLINK_FAILED,
)  # fmt: skip
"""The metrics of the storage server."""

ORCHESTRATOR_REQUESTS = _counter(
    "orchestrator_requests_total",
    "Requests to engines that have ended; status 0 where the client left, other where HTTP has no such status.",
    "path",
    "status",
)
ORCHESTRATOR_TTFT = _seconds("orchestrator_ttft_seconds", "Time from a request's arrival to its first byte.")
ORCHESTRATOR_PREDICTION_ERROR = _seconds(
    "orchestrator_prediction_error_seconds", "Distance of the time to first byte from its prediction."
)
ORCHESTRATOR_DECISION = Metric(
    "objectcache_orchestrator_decision_seconds",
    MetricKind.HISTOGRAM,
    "Time to choose an engine, when all is known.",
    (),
    (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1),
)
ORCHESTRATOR_WAIT = _seconds("orchestrator_wait_seconds", "Time that requests waited to be admitted.")
ORCHESTRATOR_REASONS = _counter("orchestrator_routed_requests_total", "Decisions, by their reason.", "reason")
ORCHESTRATOR_TOKENS = _counter(
    "orchestrator_reused_tokens_total", "Tokens of prompts that engines held, or were told to load.", "source"
)
ORCHESTRATOR_FAILOVERS = _counter(
    "orchestrator_failovers_total", "Attempts that failed before the engine had answered."
)
ORCHESTRATOR_MISMATCHES = _counter(
    "orchestrator_token_mismatches_total", "Times an engine's events did not show the prompts that it was sent."
)
ORCHESTRATOR_ACTIVE = _gauge("orchestrator_active_requests", "Requests that engines have.")
ORCHESTRATOR_WAITING = _gauge("orchestrator_waiting_requests", "Requests that wait to be admitted.")
ORCHESTRATOR_BLOCKS = _gauge("orchestrator_known_blocks", "Blocks that some engine holds, by events.")
ORCHESTRATOR_ENGINES = _gauge("orchestrator_known_engines", "Engines, by their state.", "state")
ORCHESTRATOR_EVENT_GAPS = _counter("orchestrator_event_gaps_total", "Gaps in the events of engines.")
ORCHESTRATOR_QUEUE = _gauge("orchestrator_queue_seconds", "Wait of a new prompt at an engine, as predicted.", "engine")
ORCHESTRATOR = (
    ORCHESTRATOR_REQUESTS, ORCHESTRATOR_TTFT, ORCHESTRATOR_PREDICTION_ERROR, ORCHESTRATOR_DECISION, ORCHESTRATOR_WAIT,
    ORCHESTRATOR_REASONS, ORCHESTRATOR_TOKENS, ORCHESTRATOR_FAILOVERS, ORCHESTRATOR_MISMATCHES, ORCHESTRATOR_ACTIVE,
    ORCHESTRATOR_WAITING, ORCHESTRATOR_BLOCKS, ORCHESTRATOR_ENGINES, ORCHESTRATOR_EVENT_GAPS, ORCHESTRATOR_QUEUE,
)  # fmt: skip
"""The metrics of an orchestrator, a process of its own with its own `/_objectcache/metrics`."""
