"""Headers of S3 requests, into values: whatever they hold, a value or an error that says which header."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.conditions import ReadCondition, WriteCondition, check_read
from descriptors.errors import CallerError, ErrorCode
from descriptors.objects import ByteRange, ChecksumAlgorithm, ChecksumType
from gateway.s3.conditions import COPY_SOURCE, delete_condition, parse_http_date, read_condition, write_condition
from gateway.s3.copy_headers import parse_copy_range, parse_copy_source
from gateway.s3.markup import timestamp
from gateway.s3.object_headers import (
    http_date,
    new_attributes,
    new_checksum,
    overriding_headers,
    refuse_unsupported,
    stored_headers,
)

E1, E2 = "0" * 32, "1" * 32
WHEN = "Wed, 21 Oct 2015 07:28:00 GMT"


def test_read_conditions() -> None:
    headers = {"if-match": f'"{E1}", {E2}', "if-none-match": f'W/"{E1}"', "if-modified-since": WHEN}
    assert read_condition(headers) == ReadCondition((E1, E2), (E1,), 1_445_412_480.0, None)
    assert read_condition({"x-amz-copy-source-if-match": E1}, COPY_SOURCE) == ReadCondition((E1,))
    assert read_condition({"if-match": f'W/"{E1}"'}).if_match != (E1,)
    assert read_condition({"if-match": ""}).if_match == ("",)


def test_write_conditions() -> None:
    assert write_condition({}) == WriteCondition()
    assert write_condition({"if-none-match": "*"}) == WriteCondition(if_absent=True)
    assert write_condition({"if-match": f'"{E1}"'}) == delete_condition({"if-match": E1}) == WriteCondition(E1)
    assert write_condition({"if-match": "*"}) == WriteCondition("*")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WHEN, 1_445_412_480.0),
        ("Wednesday, 21-Oct-15 07:28:00 GMT", 1_445_412_480.0),
        ("Wed Oct 21 07:28:00 2015", 1_445_412_480.0),
        ("", None),
        ("yesterday", None),
        ("Wed, 99 Oct 2015 07:28:00 GMT", None),
        (None, None),
    ],
)
def test_http_dates(text: str | None, expected: float | None) -> None:
    assert parse_http_date(text) == expected


@pytest.mark.parametrize("unix_s", [1_445_412_480.0, 1_445_412_480.9989, 1_445_412_480.9991, 1_445_412_480.9999999])
def test_a_header_tells_the_second_that_a_list_tells(unix_s: float) -> None:
    """Also in the last millisecond of a second, which both round up."""
    listed = datetime.fromisoformat(timestamp(unix_s))
    assert parse_http_date(http_date(unix_s)) == listed.replace(microsecond=0).timestamp()
    check_read(ReadCondition(if_unmodified_since=parse_http_date(http_date(unix_s))), E1, unix_s)


def test_copy_ranges() -> None:
    assert parse_copy_range({}) is None
    assert parse_copy_range({"x-amz-copy-source-range": "bytes=2-5"}) == ByteRange(2, 4)


def test_checksums_to_come() -> None:
    assert new_checksum({}) == (None, None)
    asked = {"x-amz-checksum-algorithm": "sha256"}
    assert new_checksum(asked) == (ChecksumAlgorithm.SHA256, ChecksumType.COMPOSITE)


@pytest.mark.parametrize("value", ["caf\udce9", "a\x7fb"])
def test_metadata_that_could_not_be_given_back_is_refused(value: str) -> None:
    """Bytes that are not UTF-8 arrive as surrogates."""
    with pytest.raises(CallerError) as error:
        stored_headers({"x-amz-meta-k": value})
    assert (error.value.code, error.value.field) == (ErrorCode.INVALID_ARGUMENT, "x-amz-meta-k")


NAMES = st.sampled_from(
    [
        "if-match",
        "if-none-match",
        "if-modified-since",
        "x-amz-copy-source-range",
        "x-amz-tagging",
        "x-amz-storage-class",
        "x-amz-checksum-algorithm",
        "x-amz-checksum-type",
        "x-amz-acl",
        "x-amz-meta-k",
        "content-type",
        "response-content-type",
    ]
)
VALUES = st.text(max_size=40) | st.binary(max_size=40).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
READERS: list[Callable[[Mapping[str, str]], object]] = [
    read_condition,
    write_condition,
    parse_copy_source,
    parse_copy_range,
    new_attributes,
    new_checksum,
    overriding_headers,
    refuse_unsupported,
]


@given(st.dictionaries(NAMES, VALUES, max_size=5), VALUES)
def test_any_headers_are_values_or_a_callers_error(headers: dict[str, str], source: str) -> None:
    for read in READERS:
        try:
            read({**headers, "x-amz-copy-source": source})
        except CallerError as error:
            str(error).encode(errors="surrogatepass")
