"""Lifecycle rules as an S3 service has them, by the names of botocore's model. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from descriptors.errors import ErrorCode, ServerError
from descriptors.lifecycle import LifecycleRule
from storage_server.home.rules.documents import entries_of


def lifecycle_document(rules: Sequence[LifecycleRule]) -> dict[str, Any]:
    """The configuration to set."""
    return {"Rules": [_entry(rule) for rule in rules]}


def lifecycle_rules(found: Mapping[str, Any]) -> list[LifecycleRule]:
    """The rules that are set. Raises ServerError(InternalError) for a rule that we cannot show."""
    return [_rule(entry) for entry in entries_of(found, "Rules")]


def _entry(rule: LifecycleRule) -> dict[str, Any]:
    entry: dict[str, Any] = {"ID": rule.rule_id, "Status": "Enabled" if rule.enabled else "Disabled"}
    parts: dict[str, Any] = {}
    if rule.larger_than is not None:
        parts["ObjectSizeGreaterThan"] = rule.larger_than
    if rule.smaller_than is not None:
        parts["ObjectSizeLessThan"] = rule.smaller_than
    tags = [{"Key": name, "Value": value} for name, value in rule.tags.items()]
    if rule.legacy_prefix:
        entry["Prefix"] = rule.prefix
    elif len(parts) + len(tags) + bool(rule.prefix) > 1:
        entry["Filter"] = {"And": {**({"Prefix": rule.prefix} if rule.prefix else {}), **parts, "Tags": tags}}
    elif tags:
        entry["Filter"] = {"Tag": tags[0]}
    else:
        entry["Filter"] = parts or {"Prefix": rule.prefix}
    if rule.expire_days is not None:
        entry["Expiration"] = {"Days": rule.expire_days}
    elif rule.expire_at is not None:
        entry["Expiration"] = {"Date": datetime.fromtimestamp(rule.expire_at, UTC)}
    if rule.abort_days is not None:
        entry["AbortIncompleteMultipartUpload"] = {"DaysAfterInitiation": rule.abort_days}
    return entry


_SHOWN = {"ID", "Status", "Prefix", "Filter", "Expiration", "AbortIncompleteMultipartUpload"}


def _rule(entry: Mapping[str, Any]) -> LifecycleRule:
    unknown = set(entry) - _SHOWN
    if unknown:
        problem = f"a lifecycle rule of the upstream store has {', '.join(sorted(unknown))}, which is not known here"
        raise ServerError(ErrorCode.INTERNAL_ERROR, problem)
    chosen = entry.get("Filter", {})
    chosen = chosen.get("And", chosen)
    tags = [*chosen.get("Tags", ()), *([chosen["Tag"]] if "Tag" in chosen else ())]
    expiration = entry.get("Expiration", {})
    date = expiration.get("Date")
    return LifecycleRule(
        rule_id=entry.get("ID", ""),
        enabled=entry["Status"] == "Enabled",
        prefix=entry.get("Prefix", chosen.get("Prefix", "")),
        tags={tag["Key"]: tag["Value"] for tag in tags},
        larger_than=chosen.get("ObjectSizeGreaterThan"),
        smaller_than=chosen.get("ObjectSizeLessThan"),
        expire_days=expiration.get("Days"),
        expire_at=None if date is None else date.timestamp(),
        abort_days=entry.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation"),
        legacy_prefix="Prefix" in entry,
    )
