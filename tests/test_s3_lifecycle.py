"""Lifecycle configurations, and what they say of objects."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from descriptors.errors import CallerError, ErrorCode
from descriptors.lifecycle import LifecycleRule
from gateway.xml import lifecycle_document
from gateway.xml_in import parse_lifecycle
from storage_server.lifecycle import TimeOfDay
from tests.s3_calls import fresh_bucket, headers_of, refused, status_of
from tests.support import Stack


@pytest.fixture
def bucket(servers: Stack) -> str:
    return fresh_bucket(servers)


def rule(body: str, status: str = "Enabled") -> bytes:
    return f"<LifecycleConfiguration><Rule>{body}<Status>{status}</Status></Rule></LifecycleConfiguration>".encode()


DAYS = "<Expiration><Days>3</Days></Expiration>"
ALL = "<Filter/>"


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


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", ErrorCode.MALFORMED_XML),
        (b"<LifecycleConfiguration/>", ErrorCode.MALFORMED_XML),
        (rule(DAYS), ErrorCode.MALFORMED_XML),
        (rule(ALL + "<Prefix/>" + DAYS), ErrorCode.MALFORMED_XML),
        (rule(ALL + DAYS, "enabled"), ErrorCode.MALFORMED_XML),
        (rule(ALL + "<Expiration/>"), ErrorCode.MALFORMED_XML),
        (rule(ALL + "<Expiration><Days>x</Days></Expiration>"), ErrorCode.MALFORMED_XML),
        (rule(ALL + "<Expiration><Date>tomorrow</Date></Expiration>"), ErrorCode.MALFORMED_XML),
        (rule("<Filter><Prefix>a</Prefix><ObjectSizeLessThan>1</ObjectSizeLessThan></Filter>" + DAYS),
         ErrorCode.MALFORMED_XML),
        (rule(ALL), ErrorCode.INVALID_REQUEST),
        (rule(ALL + "<Expiration><Days>0</Days></Expiration>"), ErrorCode.INVALID_ARGUMENT),
        (rule(ALL + "<Expiration><Days>-1</Days></Expiration>"), ErrorCode.INVALID_ARGUMENT),
        (rule(ALL + "<Expiration><Date>2030-01-01T01:00:00Z</Date></Expiration>"), ErrorCode.INVALID_ARGUMENT),
        (rule(f"<ID>{'i' * 256}</ID>" + ALL + DAYS), ErrorCode.INVALID_ARGUMENT),
        (rule("<Filter><Tag><Key>aws:x</Key><Value/></Tag></Filter>" + DAYS), ErrorCode.INVALID_TAG),
        (rule("<Filter><Tag><Key>a</Key><Value/></Tag></Filter><AbortIncompleteMultipartUpload>"
              "<DaysAfterInitiation>1</DaysAfterInitiation></AbortIncompleteMultipartUpload>"),
         ErrorCode.INVALID_REQUEST),
        (rule(ALL + "<Transition><Days>1</Days><StorageClass>GLACIER</StorageClass></Transition>"),
         ErrorCode.NOT_IMPLEMENTED),
        (rule(ALL + "<NoncurrentVersionExpiration><NoncurrentDays>1</NoncurrentDays></NoncurrentVersionExpiration>"),
         ErrorCode.NOT_IMPLEMENTED),
        (rule(ALL + "<Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>"),
         ErrorCode.NOT_IMPLEMENTED),
    ],
)  # fmt: skip
def test_configurations_are_checked_as_s3_checks_them(body: bytes, code: ErrorCode) -> None:
    with pytest.raises(CallerError) as error:
        parse_lifecycle(body)
    assert error.value.code is code


def test_ids_are_unique_and_made_where_missing() -> None:
    one = rule("<ID>a</ID>" + ALL + DAYS).removesuffix(b"</LifecycleConfiguration>")
    two = one + one.removeprefix(b"<LifecycleConfiguration>") + b"</LifecycleConfiguration>"
    with pytest.raises(CallerError) as error:
        parse_lifecycle(two)
    assert error.value.code is ErrorCode.INVALID_ARGUMENT
    made = parse_lifecycle(two.replace(b"<ID>a</ID>", b""))
    assert made == parse_lifecycle(two.replace(b"<ID>a</ID>", b"<ID></ID>"))
    assert len({found.rule_id for found in made}) == 2


def test_documents_read_back_as_the_rules_they_show() -> None:
    rules = [
        LifecycleRule("all", expire_days=1),
        LifecycleRule("prefix", enabled=False, prefix="a&b/", expire_at=86_400.0 * 20_000),
        LifecycleRule("tag", tags={"k": "v"}, expire_days=2),
        LifecycleRule("size", larger_than=0, expire_days=2),
        LifecycleRule("and", prefix="p", tags={"k": "v", "l": ""}, larger_than=1, smaller_than=9, expire_days=3),
        LifecycleRule("uploads", prefix="u", abort_days=4),
    ]
    assert parse_lifecycle(lifecycle_document(rules)) == rules


def test_a_prefix_outside_a_filter_is_the_older_form() -> None:
    found = parse_lifecycle(rule("<ID>x</ID><Prefix>old/</Prefix>" + DAYS))
    assert found == [LifecycleRule("x", prefix="old/", expire_days=3, legacy_prefix=True)]


def test_a_clock_that_leaps_ahead_expires_nothing() -> None:
    """The rules go on by the time before; a clock that is slewed, or set back, is followed."""
    day = TimeOfDay(1_000_000.0, 50.0)
    assert day.now(1_003_600.0, 3_650.0) == 1_003_600.0
    assert day.now(1_007_300.0, 7_250.0) == 1_007_300.0, "slewed by 100 s"
    assert day.now(9_999_999.0, 10_850.0) == 1_010_900.0
    assert day.now(9_999_999.0 + 3_600, 14_450.0) == 1_014_500.0
    assert day.now(1_014_000.0, 18_050.0) == 1_014_000.0
