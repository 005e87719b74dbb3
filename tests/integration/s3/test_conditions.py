"""Conditional reads and writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.s3_calls import fresh_bucket, refused, status_of
from tests.support.servers import Stack

PAST = datetime.now(UTC) - timedelta(days=1)
FUTURE = datetime.now(UTC) + timedelta(days=1)
OTHER_ETAG = '"00000000000000000000000000000000"'
HERE = "here"
"""Stands for the object's own ETag."""


@pytest.fixture
def stored(servers: Stack) -> tuple[str, str]:
    """A bucket with an object "k", and its ETag."""
    bucket = fresh_bucket(servers)
    return bucket, servers.s3().put_object(Bucket=bucket, Key="k", Body=b"0123456789", CacheControl="max-age=1")["ETag"]


def named(conditions: dict[str, Any], etag: str) -> dict[str, Any]:
    return {name: etag if value == HERE else value for name, value in conditions.items()}


@pytest.mark.parametrize(
    ("conditions", "status"),
    [
        ({"IfMatch": HERE}, 200),
        ({"IfMatch": "*"}, 200),
        ({"IfMatch": OTHER_ETAG}, 412),
        ({"IfNoneMatch": HERE}, 304),
        ({"IfNoneMatch": "*"}, 304),
        ({"IfNoneMatch": OTHER_ETAG}, 200),
        ({"IfModifiedSince": PAST}, 200),
        ({"IfModifiedSince": FUTURE}, 304),
        ({"IfUnmodifiedSince": PAST}, 412),
        ({"IfUnmodifiedSince": FUTURE}, 200),
        ({"IfMatch": HERE, "IfUnmodifiedSince": PAST}, 200),
        ({"IfNoneMatch": HERE, "IfModifiedSince": PAST}, 304),
        ({"IfNoneMatch": OTHER_ETAG, "IfModifiedSince": FUTURE}, 200),
        ({"IfMatch": HERE, "IfNoneMatch": HERE}, 304),
        ({"IfMatch": OTHER_ETAG, "IfNoneMatch": HERE}, 412),
    ],
)
def test_reads_under_conditions(
    servers: Stack, stored: tuple[str, str], conditions: dict[str, Any], status: int
) -> None:
    """RFC 9110, 13.2.2: ETags before dates, and a date only where its ETag is not given."""
    bucket, etag = stored
    for call in (servers.s3().get_object, servers.s3().head_object):
        if status == 200:
            assert status_of(call(Bucket=bucket, Key="k", **named(conditions, etag))) == 200
        else:
            assert refused(call, Bucket=bucket, Key="k", **named(conditions, etag))[0] == status


def test_not_modified_says_what_the_cache_has(servers: Stack, stored: tuple[str, str]) -> None:
    bucket, etag = stored
    for header in (etag, etag.strip('"'), f'"x", {etag}', f"W/{etag}", "*"):
        reply = servers.request("GET", f"/{bucket}/k", headers={"if-none-match": header})
        assert (reply.status, reply.body) == (304, b"")
        assert (reply.headers["etag"], reply.headers["cache-control"]) == (etag, "max-age=1")
        assert "last-modified" in reply.headers
    assert servers.request("GET", f"/{bucket}/k", headers={"if-modified-since": "no date"}).status == 200


def test_if_range_gives_the_part_or_the_whole(servers: Stack, stored: tuple[str, str]) -> None:
    """A client that resumes a download must never join two versions."""
    bucket, etag = stored
    modified = servers.request("HEAD", f"/{bucket}/k").headers["last-modified"]
    for validator, body in [
        (etag, b"234"),
        (modified, b"234"),
        (OTHER_ETAG, b"0123456789"),
        (f"W/{etag}", b"0123456789"),
        ("Wed, 21 Oct 2015 07:28:00 GMT", b"0123456789"),
    ]:
        reply = servers.request("GET", f"/{bucket}/k", headers={"range": "bytes=2-4", "if-range": validator})
        assert (reply.status, reply.body) == (206 if body == b"234" else 200, body)


def test_an_object_is_made_only_where_none_is(servers: Stack, stored: tuple[str, str]) -> None:
    bucket, _ = stored
    s3 = servers.s3()
    answer = refused(s3.put_object, Bucket=bucket, Key="k", Body=b"new", IfNoneMatch="*")
    assert answer == (412, "PreconditionFailed")
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"0123456789"
    s3.put_object(Bucket=bucket, Key="new", Body=b"new", IfNoneMatch="*")
    s3.delete_object(Bucket=bucket, Key="new")
    s3.put_object(Bucket=bucket, Key="new", Body=b"new", IfNoneMatch="*")


def test_an_object_is_replaced_only_where_it_is_the_one_meant(servers: Stack, stored: tuple[str, str]) -> None:
    bucket, etag = stored
    s3 = servers.s3()
    assert refused(s3.put_object, Bucket=bucket, Key="k", IfMatch=OTHER_ETAG) == (412, "PreconditionFailed")
    assert refused(s3.put_object, Bucket=bucket, Key="absent", IfMatch=etag) == (404, "NoSuchKey")
    second = s3.put_object(Bucket=bucket, Key="k", Body=b"second", IfMatch=etag)["ETag"]
    assert refused(s3.put_object, Bucket=bucket, Key="k", Body=b"third", IfMatch=etag) == (412, "PreconditionFailed")
    assert s3.head_object(Bucket=bucket, Key="k")["ETag"] == second


def test_one_of_many_wins_the_race_to_create(servers: Stack) -> None:
    """Locks and leader election over S3 rest on this."""
    bucket = fresh_bucket(servers)
    clients = [servers.s3() for _ in range(8)]
    lost: list[str] = []

    def create(index: int) -> bool:
        try:
            clients[index].put_object(Bucket=bucket, Key="lock", Body=str(index).encode(), IfNoneMatch="*")
        except ClientError as error:
            lost.append(error.response["Error"]["Code"])
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert set(lost) <= {"PreconditionFailed", "ConditionalRequestConflict"}
    assert clients[0].get_object(Bucket=bucket, Key="lock")["Body"].read() == str(won.index(True)).encode()


def test_an_object_is_deleted_only_where_it_is_the_one_meant(servers: Stack, stored: tuple[str, str]) -> None:
    bucket, etag = stored
    s3 = servers.s3()
    assert refused(s3.delete_object, Bucket=bucket, Key="k", IfMatch=OTHER_ETAG) == (412, "PreconditionFailed")
    assert status_of(s3.delete_object(Bucket=bucket, Key="k", IfMatch=etag)) == 204
    assert refused(s3.delete_object, Bucket=bucket, Key="k", IfMatch=etag) == (404, "NoSuchKey")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"if-none-match": OTHER_ETAG}, "NotImplemented"),
        ({"if-modified-since": "Wed, 21 Oct 2015 07:28:00 GMT"}, "NotImplemented"),
        ({"if-unmodified-since": "Wed, 21 Oct 2099 07:28:00 GMT"}, "NotImplemented"),
        ({"if-match": OTHER_ETAG, "if-none-match": "*"}, "NotImplemented"),
        ({"if-match": ""}, "InvalidArgument"),
        ({"if-match": f"{OTHER_ETAG}, {OTHER_ETAG}"}, "InvalidArgument"),
    ],
    ids=str,
)
def test_a_write_whose_condition_is_not_understood_is_refused(
    servers: Stack, stored: tuple[str, str], headers: dict[str, str], code: str
) -> None:
    bucket, etag = stored
    assert servers.request("PUT", f"/{bucket}/k", body=b"new", headers=headers).code == code
    assert servers.request("DELETE", f"/{bucket}/k", headers=headers).code == code
    assert servers.request("HEAD", f"/{bucket}/k").headers["etag"] == etag


def test_an_etag_of_no_character_set_matches_nothing(servers: Stack, stored: tuple[str, str]) -> None:
    """Such bytes reach the storage side as text and must not be a failure there."""
    bucket, _ = stored

    def spoil(headers: dict[str, str]) -> None:
        headers["If-Match"] = '"\xff\xfe"'

    assert servers.request("GET", f"/{bucket}/k", change=spoil).status == 412
    assert servers.request("PUT", f"/{bucket}/k", body=b"new", change=spoil).status == 412


def test_an_upload_is_completed_under_conditions(servers: Stack, stored: tuple[str, str]) -> None:
    bucket, etag = stored
    s3 = servers.s3()

    def upload(key: str) -> dict[str, Any]:
        upload_id = s3.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
        part = s3.upload_part(Bucket=bucket, Key=key, UploadId=upload_id, PartNumber=1, Body=b"part")
        parts = [{"PartNumber": 1, "ETag": part["ETag"]}]
        return {"Bucket": bucket, "Key": key, "UploadId": upload_id, "MultipartUpload": {"Parts": parts}}

    first = upload("k")
    assert refused(s3.complete_multipart_upload, **first, IfNoneMatch="*") == (412, "PreconditionFailed")
    assert refused(s3.complete_multipart_upload, **first, IfMatch=OTHER_ETAG) == (412, "PreconditionFailed")
    assert s3.head_object(Bucket=bucket, Key="k")["ETag"] == etag
    s3.complete_multipart_upload(**first, IfMatch=etag)
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"part"
    s3.complete_multipart_upload(**upload("new"), IfNoneMatch="*")
