"""Pins: a tag that keeps an object in a bounded cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime

from descriptors.errors import CallerError, ErrorCode

PIN_TAG = "objectcache-pin"


def pinned_until(tags: Mapping[str, str]) -> float | None:
    """The end of the pin in Unix seconds: infinity for a pin without a date, None where there is no pin. The tag's
    value is empty, or a date of ISO 8601, in UTC where it names no zone. Raises CallerError(InvalidTag).
    """
    text = tags.get(PIN_TAG)
    if text is None:
        return None
    if not text:
        return math.inf
    try:
        end = datetime.fromisoformat(text)
        return (end if end.tzinfo is not None else end.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        problem = f"the value of {PIN_TAG} is empty or a date such as 2027-01-31 or 2027-01-31T12:00:00Z"
        raise CallerError(ErrorCode.INVALID_TAG, problem, field="Tag") from None
