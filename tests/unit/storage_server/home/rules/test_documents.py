"""Documents that we write are read by every parser as they were meant, and those of the service are bounded."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.errors import CallerError, ErrorCode, ServerError
from storage_server.home.rules.documents import (
    ELEMENTS_MAX,
    ENTRIES_MAX,
    HERE_ENTRIES_MAX,
    call_of,
    entries_of,
    has_many_entries,
    is_writable,
    result_of,
    size_of,
)

WRITABLE = st.text(st.characters(exclude_categories=("Cs",)).filter(is_writable), min_size=1, max_size=10)


def keys_in(body: bytes) -> list[str | None]:
    return [element.text for element in ElementTree.fromstring(body).iter() if element.tag.endswith("Key")]


@given(st.lists(WRITABLE | st.text("a\r\n\t&<>\"']]>", min_size=1), min_size=1, max_size=5))
def test_keys_come_back_from_a_document_as_they_are(keys: list[str]) -> None:
    """A bare CR would be read as LF, and another object be deleted."""
    objects = [{"Key": key} for key in keys]
    call = call_of("DeleteObjects", {"Bucket": "bbb", "Delete": {"Objects": objects, "Quiet": True}})
    assert keys_in(call.body) == keys


@pytest.mark.parametrize("wrong", ["\0", "\x01", "\x0b", "\x1f", "\ufffe", "\uffff"])
def test_what_no_document_can_have_is_refused(wrong: str) -> None:
    assert not is_writable(f"a{wrong}b")
    with pytest.raises(CallerError, match="XML"):
        call_of("DeleteObjects", {"Bucket": "bbb", "Delete": {"Objects": [{"Key": f"a{wrong}b"}]}})
    tags = {"TagSet": [{"Key": "name", "Value": wrong}]}
    with pytest.raises(CallerError, match="XML"):
        call_of("PutObjectTagging", {"Bucket": "bbb", "Key": "k", "Tagging": tags})


def listed(body: bytes) -> dict[str, Any]:
    return result_of("ListObjectsV2", 200, {}, b"<ListBucketResult>" + body + b"</ListBucketResult>", dict)


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("2026-01-02T03:04:05.678Z", datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC)),
        ("2026-01-02T03:04:05Z", datetime(2026, 1, 2, 3, 4, 5, 0, UTC)),
        ("Fri, 02 Jan 2026 03:04:05 GMT", datetime(2026, 1, 2, 3, 4, 5, 0, UTC)),
        ("1767323045", datetime(2026, 1, 2, 3, 4, 5, 0, UTC)),
        ("0001-01-01T00:00:00Z", datetime(1970, 1, 1, tzinfo=UTC)),
        ("9999-12-31T23:59:59-12:00", datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),
    ],
)
def test_times_are_read_however_a_service_writes_them(text: str, when: datetime) -> None:
    found = listed(f"<Contents><LastModified>{text}</LastModified></Contents>".encode())
    assert found["Contents"][0]["LastModified"] == when


@pytest.mark.parametrize(
    "body",
    [
        b"<Contents/>" * ELEMENTS_MAX,
        b"<Contents><Size>" + b"9" * 5_000 + b"</Size></Contents>",
        b"<Contents><LastModified>" + b"9" * 400 + b"</LastModified></Contents>",
        b"<Contents><LastModified>" + b"9" * 60 + b"</LastModified></Contents>",
        b"<Contents><LastModified>now</LastModified></Contents>",
        b"<IsTruncated>",
    ],
    ids=["too many elements", "a giant number", "a giant time", "a time past all years", "no time", "no document"],
)
def test_a_bad_answer_is_the_services_error(body: bytes) -> None:
    with pytest.raises(ServerError) as refused:
        listed(body)
    assert refused.value.code is ErrorCode.INTERNAL_ERROR


def test_a_document_type_is_refused_in_answers() -> None:
    """Botocore's own parser would read it, and with it entities: its trees must come from our parser."""
    with pytest.raises(ServerError):
        result_of("ListObjectsV2", 200, {}, b"<!DOCTYPE a><ListBucketResult/>", dict)


def test_an_answer_that_lacks_what_is_needed_is_the_services_error() -> None:
    def read(found: dict[str, Any]) -> str:
        return str(found["Contents"][0]["Key"])

    assert read(listed(b"<Contents><Key>k</Key></Contents>")) == "k"
    with pytest.raises(ServerError):
        result_of("ListObjectsV2", 200, {}, b"<ListBucketResult><Contents/></ListBucketResult>", read)


def test_a_list_has_a_bound() -> None:
    assert entries_of({}, "Contents") == []
    assert len(entries_of({"Contents": [{}] * ENTRIES_MAX}, "Contents")) == ENTRIES_MAX
    with pytest.raises(ServerError, match="Contents"):
        entries_of({"Contents": [{}] * (ENTRIES_MAX + 1)}, "Contents")


def test_a_request_with_many_entries_is_long() -> None:
    few, many = [{"Key": "k"}] * HERE_ENTRIES_MAX, [{"Key": "k"}] * (HERE_ENTRIES_MAX + 1)
    assert not has_many_entries({"Bucket": "b", "Delete": {"Objects": few, "Quiet": True}})
    assert has_many_entries({"Bucket": "b", "Delete": {"Objects": many, "Quiet": True}})


@pytest.mark.parametrize("size", ["-1", str(1 << 60), "9" * 400])
def test_a_list_with_a_size_that_no_object_has_is_no_list(size: str) -> None:
    """What is passed on as it came breaks clients that count."""
    entry = f"<Contents><Key>k</Key><Size>{size}</Size></Contents>"
    body = f"<ListBucketResult>{entry}</ListBucketResult>".encode()
    with pytest.raises(ServerError, match="no such document"):
        result_of("ListObjectsV2", 200, {}, body, lambda found: [size_of(each) for each in found["Contents"]])


REFUSED = b"<Error><Code>%b</Code><Message>again</Message></Error>"
ANSWERED_BY_DOCUMENTS = ("CompleteMultipartUpload", "CopyObject", "DeleteObjects", "ListObjectsV2", "ListBuckets")


@pytest.mark.parametrize("operation", [*ANSWERED_BY_DOCUMENTS, "DeleteBucket", "PutObjectTagging"])
def test_an_error_document_is_a_refusal_whatever_the_status(operation: str) -> None:
    """S3 answers 200 before a long copy has ended."""
    with pytest.raises(ServerError) as failed:
        result_of(operation, 200, {}, REFUSED % b"InternalError", dict)
    assert (failed.value.code, failed.value.retryable) == (ErrorCode.INTERNAL_ERROR, True)
    with pytest.raises(CallerError) as refused:
        result_of(operation, 200, {}, REFUSED % b"NoSuchUpload", dict)
    assert refused.value.code is ErrorCode.NO_SUCH_UPLOAD


@pytest.mark.parametrize("body", [b"", b"<html><body>Log in</body></html>", b"<ListPartsResult/>"])
@pytest.mark.parametrize("operation", ANSWERED_BY_DOCUMENTS)
def test_another_document_than_that_of_the_operation_is_no_answer(operation: str, body: bytes) -> None:
    """An empty list would have the whole cache of a bucket removed."""
    with pytest.raises(ServerError) as refused:
        result_of(operation, 200, {}, body, dict)
    assert refused.value.code is ErrorCode.INTERNAL_ERROR


@pytest.mark.parametrize("root", ["ListBucketResult", "ListObjectsV2Output"])
def test_the_root_of_an_operation_is_its_document(root: str) -> None:
    body = f'<{root} xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Contents><Key>k</Key></Contents></{root}>'
    assert result_of("ListObjectsV2", 200, {}, body.encode(), dict)["Contents"] == [{"Key": "k"}]
