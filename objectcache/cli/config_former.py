"""Keys of former versions: a file that has some still loads, and is told what stands in their place. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIXED = "is not set any more, and its default holds"
MEMORY = "is a part of [storage] memory_bytes now, and is not set apart"
MEASURED = "was never used by servers; `objectcache calibrate theta --json` keeps what was measured"
FIXED_KEYS = {
    "gateway": (
        "body_idle_timeout_s", "header_timeout_s", "keepalive_timeout_s", "send_idle_timeout_s",
    ),
    "storage": (
        "deliveries_max", "agents_max", "open_files_max", "resolved_keys_max", "object_bytes_max",
        "lifecycle_interval_s", "lifecycle_day_s", "gather_threads", "least_bytes_per_s",
    ),
    "upstream": (
        "connect_timeout_s", "read_timeout_s", "connections_max", "fetches_max", "uploads_max", "poll_s",
        "segment_body_bytes_max",
    ),
    "orchestrator": (
        "store_timeout_s", "body_bytes_max", "bodies_bytes_max", "connections_max", "header_timeout_s",
        "body_timeout_s", "keepalive_timeout_s", "send_idle_timeout_s", "poll_s", "probe_timeout_s",
        "token_cache_bytes", "response_cache_s", "receipts_max", "prefill_tokens_min",
    ),
    "compression": ("half_life_s",),
    "engines": ("token_us",),
    "upstream.remote_dram": ("namespace",),
}  # fmt: skip
MEMORY_KEYS = {
    "storage": ("staging_bytes", "buffer_bytes", "rdma_buffer_bytes", "resolved_bytes_max"),
}
INTERNAL_KEYS = {
    "gateway": ("connections_max", "document_timeout_s", "document_bytes", "document_key_bytes"),
    "storage": (
        "aggregation_bytes", "window_bytes", "direct_payload_bytes", "packed_bytes_max", "stall_timeout_s",
        "compact_interval_s", "compact_live_fraction_max", "compact_bytes_per_s", "dedup_bytes_per_s",
    ),
    "scheduler": (
        "policy", "rates", "epoch_s_max", "gather_s", "chunkwise_fraction", "chunkwise_deliveries_max",
        "queued_bytes_max",
    ),
    "upstream": ("landing_bytes",),
    "cluster": ("lease_s",),
    "orchestrator": ("queue_max",),
}  # fmt: skip
"""Keys that moved to `[internals.TABLE]`, and hold from their former place, too."""


def renewed(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The document with the keys of now, and a sentence for each key that was another one."""
    found: dict[str, Any] = {name: _copied(value) for name, value in document.items()}
    told: list[str] = []
    if "calibration" in found:
        del found["calibration"]
        told.append(f"[calibration] {MEASURED}")
    for keys, what in ((FIXED_KEYS, FIXED), (MEMORY_KEYS, MEMORY)):
        for table, names in keys.items():
            told += [f"[{table}] {name} {what}" for name in _taken(found, table, names)]
    for table, names in INTERNAL_KEYS.items():
        taken = _taken(found, table, names)
        if taken:
            told += [f"[{table}] {name} is [internals.{table}] {name} now" for name in taken]
            internals = found.get("internals", {})
            if isinstance(internals, Mapping) and isinstance(internals.get(table, {}), Mapping):
                found["internals"] = {**internals, table: {**taken, **internals.get(table, {})}}
    _renew_orchestrator(found, told)
    return found, told


def _renew_orchestrator(found: dict[str, Any], told: list[str]) -> None:
    """Two waits for an engine are one now."""
    waits = _taken(found, "orchestrator", ("first_byte_timeout_s", "stream_idle_timeout_s"))
    if waits:
        told += [f"[orchestrator] {name} is [orchestrator] engine_timeout_s now" for name in waits]
        found["orchestrator"].setdefault("engine_timeout_s", _longest(waits))


def _longest(waits: Mapping[str, Any]) -> Any:
    numbers = [value for value in waits.values() if isinstance(value, int | float)]
    return max(numbers) if len(numbers) == len(waits) else next(iter(waits.values()))


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _taken(document: Mapping[str, Any], table: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of these keys that the table has, or one of the tables of an array, and does not have any more
    afterwards.
    """
    value: Any = document
    for part in table.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    tables = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]
    return {name: each.pop(name) for each in tables for name in names if name in each}
