"""Documents of lifecycle rules."""

from __future__ import annotations

import pytest

from descriptors.errors import CallerError, ErrorCode
from descriptors.lifecycle import LifecycleRule
from gateway.s3.xml import lifecycle_document
from gateway.s3.xml_in import parse_lifecycle


def rule(body: str, status: str = "Enabled") -> bytes:
    return f"<LifecycleConfiguration><Rule>{body}<Status>{status}</Status></Rule></LifecycleConfiguration>".encode()


DAYS = "<Expiration><Days>3</Days></Expiration>"
ALL = "<Filter/>"


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
