"""Lifecycle configurations at a server, and what they say of objects."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from storage_server.kernel.time_of_day import TimeOfDay
from tests.support.s3_calls import fresh_bucket, headers_of, refused, status_of
from tests.support.servers import Stack


@pytest.fixture
def bucket(servers: Stack) -> str:
    return fresh_bucket(servers)


def test_a_configuration_is_kept_replaced_and_taken_away(servers: Stack, bucket: str) -> None:
    s3 = servers.s3()
    assert refused(s3.get_bucket_lifecycle_configuration, Bucket=bucket) == (404, "NoSuchLifecycleConfiguration")
    rules: list[dict[str, Any]] = [
        {"ID": "days", "Status": "Enabled", "Filter": {"Prefix": "tmp/"}, "Expiration": {"Days": 3}},
        {
            "ID": "date",
            "Status": "Disabled",
            "Filter": {"Tag": {"Key": "k", "Value": "v"}},
            "Expiration": {"Date": datetime(2099, 1, 2, tzinfo=UTC)},
        },
        {
            "ID": "both",
            "Status": "Enabled",
            "Filter": {
                "And": {
                    "Prefix": "big/",
                    "Tags": [{"Key": "a", "Value": "1"}, {"Key": "b", "Value": ""}],
                    "ObjectSizeGreaterThan": 500,
                    "ObjectSizeLessThan": 64000,
                }
            },
            "Expiration": {"Days": 1},
        },
        {
            "ID": "uploads",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
        },
    ]
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": rules})
    kept = s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert [{name: r[name] for name in rules[i]} for i, r in enumerate(kept)] == rules
    one = {"Rules": rules[:1]}
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=one)
    assert len(s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]) == 1
    assert status_of(s3.delete_bucket_lifecycle(Bucket=bucket)) == 204
    assert refused(s3.get_bucket_lifecycle_configuration, Bucket=bucket) == (404, "NoSuchLifecycleConfiguration")


def test_an_object_says_when_it_expires(servers: Stack, bucket: str) -> None:
    s3 = servers.s3()
    rules = [
        {"ID": "soon rule", "Status": "Enabled", "Filter": {"Prefix": "tmp/"}, "Expiration": {"Days": 2}},
        {"ID": "later", "Status": "Enabled", "Filter": {"Prefix": "tmp/"}, "Expiration": {"Days": 20}},
        {"ID": "off", "Status": "Disabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 1}},
    ]
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": rules})
    put = s3.put_object(Bucket=bucket, Key="tmp/k", Body=b"x")
    head = s3.head_object(Bucket=bucket, Key="tmp/k")
    copy = s3.copy_object(Bucket=bucket, Key="tmp/copy", CopySource=f"{bucket}/tmp/k")
    for answer in (put, head, copy):
        found = re.fullmatch('expiry-date="(.+)", rule-id="(.+)"', answer["Expiration"])
        assert found is not None
        assert found.group(2) == "soon%20rule"
        when = parsedate_to_datetime(found.group(1))
        assert when.hour == when.minute == when.second == 0
        assert timedelta(days=2) <= when - head["LastModified"] <= timedelta(days=3)
    assert "x-amz-expiration" not in headers_of(s3.put_object(Bucket=bucket, Key="other", Body=b"x"))


def test_a_clock_that_leaps_ahead_expires_nothing() -> None:
    """The rules go on by the time before; a clock that is slewed, or set back, is followed."""
    day = TimeOfDay(1_000_000.0, 50.0)
    assert day.now(1_003_600.0, 3_650.0) == 1_003_600.0
    assert day.now(1_007_300.0, 7_250.0) == 1_007_300.0, "slewed by 100 s"
    assert day.now(9_999_999.0, 10_850.0) == 1_010_900.0
    assert day.now(9_999_999.0 + 3_600, 14_450.0) == 1_014_500.0
    assert day.now(1_014_000.0, 18_050.0) == 1_014_000.0
