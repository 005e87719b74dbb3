"""Where figures come from: when, of which commit, on which machine; for a report, and in short for a config file."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from bench.machine import describe_commit, describe_machine


def describe_origin() -> dict[str, Any]:
    """Now and here."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"measured_at": now, **describe_commit(), "machine": describe_machine()}


def origin_entries(origin: Mapping[str, Any]) -> dict[str, str]:
    """`measured_at`, `machine` and, where it is known, `commit`."""
    machine = origin["machine"]
    processor = f"{machine['cpu_model']}, {machine['cpu_count']} processors, {machine['memory_bytes']} bytes of memory"
    found = {"measured_at": origin["measured_at"], "machine": processor}
    if origin["commit"] is not None:
        found["commit"] = origin["commit"] + (" with local changes" if origin["has_local_changes"] else "")
    return found


def six_digits(value: float) -> float:
    """Six significant ones, which is more than any figure here has."""
    return float(f"{value:.6g}")
