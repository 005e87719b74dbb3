"""What an upstream service says of its objects, and what it is asked."""

from __future__ import annotations

import pytest

from descriptors.conditions import ReadCondition, WriteCondition
from descriptors.errors import ErrorCode, ServerError
from descriptors.objects import Attributes, ByteRange, ChecksumType, RangeSpec, ReadRequest
from storage_server.home.rules.headers import (
    METADATA_BYTES_MAX,
    attribute_headers,
    has_digest,
    http_time,
    is_md5,
    metadata_bytes,
    object_info,
    part_count,
    proof_header,
    put_time,
    range_text,
    read_head,
    read_headers,
    write_headers,
)
from storage_server.home.rules.proof import make_proof

WHOLE = {"content-length": "10", "etag": '"abc"', "last-modified": "Wed, 21 Oct 2015 07:28:00 GMT"}


def test_an_answer_tells_the_object() -> None:
    headers = {
        **WHOLE,
        "content-type": "text/plain",
        "x-amz-meta-a": "b",
        "x-amz-meta-objectcache-proof": "16384:AAAAAA==",
        "x-amz-storage-class": "STANDARD_IA",
        "x-amz-checksum-crc32c": "AAAAAA==-2",
        "x-amz-expiration": 'expiry-date="Fri, 23 Oct 2015 00:00:00 GMT", rule-id="soon"',
    }
    head = read_head("key", 200, headers, {"tag": "one"})
    assert head.range == ByteRange(0, 10)
    assert head.info.attributes == Attributes(
        {"content-type": "text/plain", "x-amz-meta-a": "b"}, {"tag": "one"}, "STANDARD_IA"
    )
    assert (head.info.etag, head.info.modified_at) == ("abc", 1445412480.0)
    assert head.info.checksum is not None
    assert head.info.checksum.type is ChecksumType.COMPOSITE
    assert head.expiry == (1445558400.0, "soon")


def test_the_time_of_a_put_is_what_a_head_will_tell_where_the_service_says_it() -> None:
    date = "Wed, 21 Oct 2015 07:28:01 GMT"
    assert put_time({"date": date, "last-modified": WHOLE["last-modified"]}) == 1445412480.0
    assert put_time({"date": date}) == 1445412481.0
    assert put_time({}) == 0.0


@pytest.mark.parametrize(
    "date",
    [
        "",
        "never",
        "1",
        "Wed, 21 Oct 99999999999 07:28:00 GMT",
        "Wed, 21 Oct 2015 07:28:00 +99999999999",
        "Fri, 31 Dec 9999 23:59:59 -1200",
        "Mon, 21 Oct 1901 07:28:00 GMT",
        "Wed, 21 Oct 2015 99999999999999999999:28:00 GMT",
        "Wed, 21 Oct 2015 07:28:00 -9999999999999999999999",
        f"Wed, {'9' * 5_000} Oct 2015 07:28:00 GMT",
    ],
)
def test_an_absurd_date_is_none(date: str) -> None:
    """The library's parser raises ValueError, TypeError or OverflowError, by kind."""
    assert http_time(date) <= 0.0
    assert read_head("key", 200, {**WHOLE, "last-modified": date}, {}).info.modified_at <= 0.0


@pytest.mark.parametrize("default", ["binary/octet-stream", "application/octet-stream"])
def test_a_content_type_that_nobody_gave_is_none(default: str) -> None:
    assert object_info("key", 1, {**WHOLE, "content-type": default}, {}).attributes.headers == {}


def test_a_part_of_an_object_says_which() -> None:
    head = read_head("key", 206, {**WHOLE, "content-range": "bytes 5-14/100"}, {})
    assert (head.range, head.info.nbytes) == (ByteRange(5, 10), 100)


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        (200, {"content-length": "ten"}),
        (200, {"etag": ""}),
        (200, {"etag": '"a\x1bb"'}),
        (200, {"x-amz-meta-a": "\x07"}),
        (200, {"x-amz-storage-class": "\x7f"}),
        (200, {"x-amz-checksum-crc32": "\x01"}),
        (206, {}),
        (206, {"content-range": "bytes 5-13/100"}),
        (206, {"content-range": "bytes 5-14/14"}),
        (206, {"content-range": "bytes 5-14/*"}),
        (200, {"content-length": "9" * 5_000}),
        (206, {"content-range": f"bytes 5-14/{'9' * 5_000}"}),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(status: int, changes: dict[str, str]) -> None:
    with pytest.raises(ServerError) as refused:
        read_head("key", status, {**WHOLE, **changes}, {})
    assert refused.value.code is ErrorCode.INTERNAL_ERROR


def test_etags_tell_parts_and_md5s() -> None:
    assert [part_count(etag) for etag in ("0" * 32, f"{'0' * 32}-7", "a-b")] == [None, 7, None]
    assert part_count(f"a-{'9' * 5_000}") is None
    assert [is_md5(etag) for etag in ("0" * 32, f"{'0' * 32}-7", "A" * 32, "0" * 31)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({}, True),
        ({"x-amz-server-side-encryption": "AES256"}, True),
        ({"x-amz-server-side-encryption": "aws:kms"}, False),
        ({"x-amz-server-side-encryption": "aws:kms:dsse"}, False),
        ({"x-amz-server-side-encryption-customer-algorithm": "AES256"}, False),
    ],
)
def test_etags_of_encrypted_objects_are_no_digests(headers: dict[str, str], wanted: bool) -> None:
    assert has_digest(headers) is wanted


@pytest.mark.parametrize(
    ("spec", "text"),
    [(RangeSpec(0, 9), "bytes=0-9"), (RangeSpec(5, None), "bytes=5-"), (RangeSpec(suffix=3), "bytes=-3")],
)
def test_a_range_is_asked_for(spec: RangeSpec, text: str) -> None:
    assert range_text(spec) == text
    assert read_headers(ReadRequest("bucket", "key", spec))["range"] == text


def test_conditions_are_asked_for_as_a_service_understands_them() -> None:
    """A list of ETags is left out, and with it the dates that it takes precedence over."""

    def asked(condition: ReadCondition) -> dict[str, str]:
        headers = read_headers(ReadRequest("bucket", "key", condition=condition))
        return {name: value for name, value in headers.items() if name.startswith("if-")}

    assert asked(ReadCondition(if_match=("a",))) == {"if-match": '"a"'}
    assert asked(ReadCondition(if_none_match=("*",), if_modified_since=0)) == {"if-none-match": "*"}
    assert asked(ReadCondition(if_match=("a", "b"), if_unmodified_since=0)) == {}
    assert asked(ReadCondition(if_modified_since=0)) == {"if-modified-since": "Thu, 01 Jan 1970 00:00:00 GMT"}
    assert write_headers(WriteCondition(if_match="a")) == {"if-match": '"a"'}
    assert write_headers(WriteCondition(if_absent=True)) == {"if-none-match": "*"}


def test_attributes_are_sent_with_an_object() -> None:
    attributes = Attributes({"content-type": "a/b", "x-amz-meta-a": "b"}, {"tag": "ü &"}, "GLACIER")
    assert attribute_headers(attributes) == {
        "content-type": "a/b",
        "x-amz-meta-a": "b",
        "x-amz-tagging": "tag=%C3%BC+%26",
        "x-amz-storage-class": "GLACIER",
    }
    assert "x-amz-tagging" not in attribute_headers(attributes, with_tags=False)


@pytest.mark.parametrize(
    ("name", "value", "is_kept"),
    [
        ("class", "code", True),
        ("class", "Code " * 400, False),
        ("chunk", "true", True),
        ("chunk", "yes", False),
    ],
)
def test_what_others_wrote_there_is_kept_only_where_it_is_a_value_of_ours(name: str, value: str, is_kept: bool) -> None:
    """Everybody who may write to the other service may write its metadata."""
    found = object_info("key", 1, {**WHOLE, f"x-amz-meta-objectcache-{name}": value}, {}).attributes.headers
    assert found.get(f"x-amz-objectcache-{name}") == (value if is_kept else None)


def test_a_head_that_is_too_long_to_keep_is_refused() -> None:
    """Each row of the index would have it."""
    heads = {f"x-amz-meta-{number}": "v" * 1000 for number in range(20)}
    with pytest.raises(ServerError):
        object_info("key", 1, {**WHOLE, **heads}, {})
    assert object_info("key", 1, {**WHOLE, **dict(list(heads.items())[:2])}, {}).attributes.headers


@pytest.mark.parametrize("value_bytes", [0, 1000, 1900, 2036])
def test_a_proof_leaves_the_callers_metadata_its_room(value_bytes: int) -> None:
    """A service would refuse a legal PUT, and a dirty chunk for ever."""
    described = {"x-amz-meta-a": "v" * value_bytes, "content-type": "c" * 2000}
    proof = make_proof(4 << 20, bytes(4 * 256))
    found = proof_header(proof, described)
    assert metadata_bytes({**described, **found}) <= METADATA_BYTES_MAX
    assert bool(found) is (value_bytes < 2000)
