"""Lifecycle configurations in S3's XML, parsed into rules."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import UTC, datetime

from descriptors.errors import CallerError, ErrorCode
from descriptors.lifecycle import DAY_S, LifecycleRule
from gateway.s3.tags import checked_tags
from gateway.s3.xml_tree import Node, malformed, parse_tree

RULES_MAX = 1000
RULE_ID_CHARACTERS_MAX = 255
PREFIX_BYTES_MAX = 1024
DAYS_MAX = 2**31 - 1
_ACTIONS = ("Expiration", "AbortIncompleteMultipartUpload")
_OTHER_ACTIONS = ("Transition", "NoncurrentVersionExpiration", "NoncurrentVersionTransition")
_TERMS = ("Prefix", "Tag", "ObjectSizeGreaterThan", "ObjectSizeLessThan")


def parse_lifecycle(body: bytes) -> list[LifecycleRule]:
    """The rules of a LifecycleConfiguration. Raises CallerError: MalformedXML, InvalidArgument, InvalidRequest,
    InvalidTag; NotImplemented for actions that need versions or storage tiers.
    """
    root = parse_tree(body, "LifecycleConfiguration")
    root.expect(("Rule",))
    if not 1 <= len(root.children) <= RULES_MAX:
        raise malformed(f"a lifecycle configuration has 1 to {RULES_MAX} rules")
    rules = [_rule(node, index) for index, node in enumerate(root.children)]
    if len({rule.rule_id for rule in rules}) < len(rules):
        raise _invalid("rule ids must be unique", "ID")
    return rules


def _rule(node: Node, index: int) -> LifecycleRule:
    node.expect(("ID", "Prefix", "Filter", "Status", *_ACTIONS, *_OTHER_ACTIONS))
    for name in _OTHER_ACTIONS:
        if node.all(name):
            raise CallerError(ErrorCode.NOT_IMPLEMENTED, f"{name} is not implemented", field=name)
    status = node.need("Status").text.strip()
    if status not in ("Enabled", "Disabled"):
        raise malformed("Status must be Enabled or Disabled")
    given_id = (node.leaf("ID") or "").strip()
    if len(given_id) > RULE_ID_CHARACTERS_MAX:
        raise _invalid(f"a rule id has at most {RULE_ID_CHARACTERS_MAX} characters", "ID")
    covered = _coverage(node)
    expire_days, expire_at = _expiration(node.only("Expiration"))
    abort_days = _abort(node.only("AbortIncompleteMultipartUpload"))
    if expire_days is None and expire_at is None and abort_days is None:
        raise CallerError(ErrorCode.INVALID_REQUEST, "a rule must have an action", field="Rule")
    if abort_days is not None and (covered.tags or covered.larger_than is not None or covered.smaller_than is not None):
        problem = "AbortIncompleteMultipartUpload cannot be limited by tags or sizes"
        raise CallerError(ErrorCode.INVALID_REQUEST, problem, field="Filter")
    return LifecycleRule(
        rule_id=given_id or _made_id(covered, index),
        enabled=status == "Enabled",
        prefix=covered.prefix,
        tags=covered.tags,
        larger_than=covered.larger_than,
        smaller_than=covered.smaller_than,
        expire_days=expire_days,
        expire_at=expire_at,
        abort_days=abort_days,
        legacy_prefix=covered.legacy_prefix,
    )


def _coverage(rule: Node) -> LifecycleRule:
    """A rule that has only its filter."""
    chosen, legacy = rule.only("Filter"), rule.only("Prefix")
    if (chosen is None) == (legacy is None):
        raise malformed("a rule must have Filter, or else Prefix")
    if chosen is None:
        return replace(_terms(rule, ()), legacy_prefix=True)
    chosen.expect((*_TERMS, "And"))
    if len(chosen.children) > 1:
        raise malformed("Filter has one condition, or And")
    both = chosen.only("And")
    if both is None:
        return _terms(chosen, ())
    both.expect(_TERMS)
    return _terms(both, both.all("Tag"))


def _terms(node: Node, tags: tuple[()] | list[Node]) -> LifecycleRule:
    prefix = node.leaf("Prefix") or ""
    if len(prefix.encode()) > PREFIX_BYTES_MAX:
        raise _invalid(f"a prefix has at most {PREFIX_BYTES_MAX} bytes", "Prefix")
    pairs = []
    for tag in tags or node.all("Tag"):
        tag.expect(("Key", "Value"))
        pairs.append((tag.need("Key").text, tag.leaf("Value") or ""))
    larger, smaller = _size(node, "ObjectSizeGreaterThan"), _size(node, "ObjectSizeLessThan")
    if larger is not None and smaller is not None and larger >= smaller:
        raise CallerError(ErrorCode.INVALID_REQUEST, "no size lies between the two given", field="ObjectSizeLessThan")
    return LifecycleRule("", prefix=prefix, tags=checked_tags(pairs), larger_than=larger, smaller_than=smaller)


def _expiration(node: Node | None) -> tuple[int | None, float | None]:
    if node is None:
        return None, None
    node.expect(("Days", "Date", "ExpiredObjectDeleteMarker"))
    if node.all("ExpiredObjectDeleteMarker"):
        problem = "ExpiredObjectDeleteMarker needs versions, which are not implemented"
        raise CallerError(ErrorCode.NOT_IMPLEMENTED, problem, field="ExpiredObjectDeleteMarker")
    days, date = node.leaf("Days"), node.leaf("Date")
    if (days is None) == (date is None):
        raise malformed("Expiration has Days or Date")
    return (_days(days, "Days"), None) if days is not None else (None, _midnight(date or ""))


def _abort(node: Node | None) -> int | None:
    if node is None:
        return None
    node.expect(("DaysAfterInitiation",))
    return _days(node.need("DaysAfterInitiation").text, "DaysAfterInitiation")


def _days(text: str, name: str) -> int:
    days = _integer(text, name)
    if not 1 <= days <= DAYS_MAX:
        raise _invalid(f"{name} must be a positive integer", name)
    return days


def _size(node: Node, name: str) -> int | None:
    text = node.leaf(name)
    if text is None:
        return None
    size = _integer(text, name)
    if size < 0:
        raise _invalid(f"{name} must not be negative", name)
    return size


def _integer(text: str, name: str) -> int:
    digits = text.strip()
    bare = digits.removeprefix("-")
    if not bare.isascii() or not bare.isdigit() or len(bare) > 18:
        raise malformed(f"{name} must be an integer")
    return int(digits)


def _midnight(text: str) -> float:
    try:
        when = datetime.fromisoformat(text.strip())
        unix_s = (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise malformed("Date must be given as ISO 8601") from None
    if unix_s % DAY_S:
        raise _invalid("Date must be at midnight UTC", "Date")
    return unix_s


def _made_id(covered: LifecycleRule, index: int) -> str:
    """An id for a rule without one. The same document always gets the same ids."""
    return hashlib.sha256(f"{index} {covered!r}".encode()).hexdigest()[:32]


def _invalid(problem: str, name: str) -> CallerError:
    return CallerError(ErrorCode.INVALID_ARGUMENT, problem, field=name)
