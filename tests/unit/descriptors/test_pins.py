"""The tag that keeps an object in a bounded cache."""

from __future__ import annotations

import math

import pytest

from descriptors.errors import CallerError, ErrorCode
from descriptors.pins import pinned_until
from gateway.s3.tags import parse_tagging_header


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", math.inf),
        ("2027-01-31", 1_801_353_600.0),
        ("2027-01-31T12:00:00Z", 1_801_396_800.0),
        ("2027-01-31T12:00:00+01:00", 1_801_393_200.0),
    ],
)
def test_the_end_of_a_pin(value: str, expected: float) -> None:
    assert pinned_until({"objectcache-pin": value, "other": "x"}) == expected


def test_without_the_tag_there_is_no_pin() -> None:
    assert pinned_until({"other": "2027-01-31"}) is None


@pytest.mark.parametrize("value", ["forever", "2027-13-01", "31.1.2027", "9999999-01-01"])
def test_a_date_that_is_none_is_refused_when_it_is_set(value: str) -> None:
    with pytest.raises(CallerError, match="date") as refused:
        parse_tagging_header(f"objectcache-pin={value}")
    assert refused.value.code is ErrorCode.INVALID_TAG
