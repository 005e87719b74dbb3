"""Lifecycle rules: when an object expires and when an unfinished upload is given up. Pure; time is an argument."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from descriptors.objects import ObjectInfo

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class LifecycleRule:
    """One enabled or disabled rule. It covers objects that start with `prefix`, carry all of `tags`, and have a size
    strictly between `larger_than` and `smaller_than`; uploads by prefix alone.

    At most one of `expire_days` and `expire_at` (Unix seconds) is given; `abort_days` is for unfinished uploads.
    `legacy_prefix` says that the request gave the prefix outside a filter, and that answers shall do the same.
    """

    rule_id: str
    enabled: bool = True
    prefix: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    larger_than: int | None = None
    smaller_than: int | None = None
    expire_days: int | None = None
    expire_at: float | None = None
    abort_days: int | None = None
    legacy_prefix: bool = False


def covers(rule: LifecycleRule, info: ObjectInfo) -> bool:
    """Whether the rule's filter covers this object."""
    return (
        info.key.startswith(rule.prefix)
        and all(info.attributes.tags.get(name) == value for name, value in rule.tags.items())
        and (rule.larger_than is None or info.nbytes > rule.larger_than)
        and (rule.smaller_than is None or info.nbytes < rule.smaller_than)
    )


def due_at(from_s: float, days: int, day_s: float = DAY_S) -> float:
    """When something `days` old from `from_s` is due: the next midnight (UTC) after that many days, as S3 rounds."""
    return math.ceil((from_s + days * day_s) / day_s) * day_s


def expiry(rules: Iterable[LifecycleRule], info: ObjectInfo, day_s: float = DAY_S) -> tuple[float, str] | None:
    """The first time at which a rule expires the object (Unix seconds), and the rule's id; None when no rule does."""
    found: tuple[float, str] | None = None
    for rule in rules:
        if not rule.enabled or not covers(rule, info):
            continue
        when = due_at(info.modified_at, rule.expire_days, day_s) if rule.expire_days is not None else rule.expire_at
        if when is not None and (found is None or when < found[0]):
            found = when, rule.rule_id
    return found


def upload_due_at(
    rules: Iterable[LifecycleRule], key: str, initiated_at: float, day_s: float = DAY_S
) -> tuple[float, str] | None:
    """The time at which an unfinished upload is aborted, and the rule's id; None when no rule aborts it."""
    due = [
        (due_at(initiated_at, rule.abort_days, day_s), rule.rule_id)
        for rule in rules
        if rule.enabled and rule.abort_days is not None and key.startswith(rule.prefix)
    ]
    return min(due, default=None)
