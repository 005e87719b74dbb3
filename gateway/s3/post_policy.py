"""The policy that signs a browser's upload by HTML form: what it may say, and whether a form keeps to it. Pure.

Source: Amazon S3 User Guide, "Browser-based uploads using POST (AWS Signature Version 4)".
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from descriptors.errors import CallerError, ErrorCode

POLICY_FIELD = "policy"
_UNCHECKED = frozenset({POLICY_FIELD, "x-amz-signature", "awsaccesskeyid", "signature", "file"})
"""Fields that no condition needs to name."""
_IGNORED_PREFIX = "x-ignore-"
_EXPIRATION = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z\Z")
_LENGTH = "content-length-range"
_OPERATORS = ("eq", "starts-with")


@dataclass(frozen=True, slots=True)
class Condition:
    """A field must equal `value`, or begin with it. The name of the field has no `$` and no capital letters."""

    operator: str
    field: str
    value: str

    def holds_for(self, given: str) -> bool:
        """Whether a field's value keeps to the condition. Content types that commas separate must all do so."""
        if self.operator == "eq":
            return given == self.value
        values = given.split(",") if self.field == "content-type" else [given]
        return all(each.strip().startswith(self.value) for each in values)

    def __str__(self) -> str:
        return json.dumps([self.operator, f"${self.field}", self.value])


@dataclass(frozen=True, slots=True)
class PostPolicy:
    """`expires_at` is in Unix seconds. The file must have `least_bytes` to `most_bytes` bytes; None: any number."""

    expires_at: float
    conditions: tuple[Condition, ...]
    least_bytes: int = 0
    most_bytes: int | None = None

    def check(self, fields: Mapping[str, str], now_s: float) -> None:
        """Raises CallerError(AccessDenied) where the policy has expired or the form does not keep to it. `fields` are
        all fields of the form by their names in small letters, and the bucket.
        """
        if now_s >= self.expires_at:
            raise _denied("Policy expired.", "policy")
        for condition in self.conditions:
            if not condition.holds_for(fields.get(condition.field, "")):
                raise _denied(f"Policy Condition failed: {condition}", condition.field)
        named = {condition.field for condition in self.conditions} | _UNCHECKED
        extra = sorted(name for name in fields if name not in named and not name.startswith(_IGNORED_PREFIX))
        if extra:
            raise _denied(f"Extra input fields: {', '.join(extra)}", extra[0])

    def check_bytes(self, nbytes: int) -> None:
        """Raises CallerError: EntityTooSmall, EntityTooLarge."""
        if nbytes < self.least_bytes:
            problem = f"Your proposed upload is smaller than the minimum allowed size, {self.least_bytes} bytes"
            raise CallerError(ErrorCode.ENTITY_TOO_SMALL, problem, field=_LENGTH)
        if self.most_bytes is not None and nbytes > self.most_bytes:
            problem = f"Your proposed upload exceeds the maximum allowed size, {self.most_bytes} bytes"
            raise CallerError(ErrorCode.ENTITY_TOO_LARGE, problem, field=_LENGTH)


def parse_policy(text: str) -> PostPolicy:
    """The policy of a form, which is JSON in base64. Raises CallerError(InvalidPolicyDocument)."""
    try:
        document = json.loads(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, RecursionError):
        raise _invalid("it is not JSON in base64") from None
    if not isinstance(document, dict):
        raise _invalid("it is not an object")
    expiration, conditions = document.get("expiration"), document.get("conditions")
    if not isinstance(expiration, str) or not _EXPIRATION.match(expiration):
        raise _invalid("'expiration' must be a time as 2030-01-31T12:00:00.000Z")
    try:
        expires_at = datetime.fromisoformat(expiration).astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        raise _invalid("'expiration' is no valid time") from None
    if not isinstance(conditions, list) or not conditions:
        raise _invalid("'conditions' must be a list of conditions")
    found: list[Condition] = []
    least_bytes, most_bytes = 0, None
    for condition in conditions:
        if isinstance(condition, list) and condition and str(condition[0]).lower() == _LENGTH:
            low, high = _length_range(condition)
            least_bytes, most_bytes = max(least_bytes, low), high if most_bytes is None else min(most_bytes, high)
        else:
            found += _conditions(condition)
    return PostPolicy(expires_at, tuple(found), least_bytes, most_bytes)


def _length_range(condition: list[object]) -> tuple[int, int]:
    try:
        _, low, high = (int(each) if index else 0 for index, each in enumerate(map(str, condition)))
    except ValueError:
        raise _invalid("content-length-range has two numbers") from None
    if not 0 <= low <= high:
        raise _invalid("content-length-range has its smaller number first, and none below 0")
    return low, high


def _conditions(condition: object) -> list[Condition]:
    """Those of a list of operator, field and value, or of an object of fields and values."""
    match condition:
        case [str(operator), str(field), str(value)] if operator.lower() in _OPERATORS and field.startswith("$"):
            return [Condition(operator.lower(), field[1:].lower(), value)]
        case dict() if condition and all(isinstance(value, str) for value in condition.values()):
            return [Condition("eq", name.lower(), value) for name, value in condition.items()]
    raise _invalid("a condition is an object of one field and its value, or a list of operator, $field and value")


def _denied(problem: str, field: str) -> CallerError:
    return CallerError(ErrorCode.ACCESS_DENIED, f"Invalid according to Policy: {problem}", field=field)


def _invalid(problem: str) -> CallerError:
    return CallerError(ErrorCode.INVALID_POLICY_DOCUMENT, f"Invalid Policy: {problem}", field="policy")
