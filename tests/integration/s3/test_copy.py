"""CopyObject."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.s3_calls import fresh_bucket, headers_of, refused
from tests.support.servers import CONFIG, Stack, stack

PAST = datetime.now(UTC) - timedelta(days=1)
FUTURE = datetime.now(UTC) + timedelta(days=1)
OTHER_ETAG = '"00000000000000000000000000000000"'


@pytest.fixture
def bucket(servers: Stack) -> str:
    """A bucket with an object "source" that has metadata, tags and a storage class."""
    name = fresh_bucket(servers)
    servers.s3().put_object(
        Bucket=name,
        Key="source",
        Body=b"the bytes",
        ContentType="a/b",
        Metadata={"k": "v"},
        Tagging="colour=red",
        StorageClass="STANDARD_IA",
    )
    return name


def test_a_copy_takes_metadata_and_tags_along(servers: Stack, bucket: str) -> None:
    """The storage class is the request's: STANDARD where it says none."""
    s3 = servers.s3()
    target = fresh_bucket(servers)
    done = s3.copy_object(Bucket=target, Key="copy", CopySource={"Bucket": bucket, "Key": "source"})
    got = s3.get_object(Bucket=target, Key="copy")
    assert (got["Body"].read(), got["ContentType"], got["Metadata"]) == (b"the bytes", "a/b", {"k": "v"})
    assert (got["ETag"], got["TagCount"]) == (done["CopyObjectResult"]["ETag"], 1)
    assert "StorageClass" not in got
    assert s3.get_object_tagging(Bucket=target, Key="copy")["TagSet"] == [{"Key": "colour", "Value": "red"}]


def test_a_copy_can_be_given_its_own(servers: Stack, bucket: str) -> None:
    s3 = servers.s3()
    new = {
        "ContentType": "c/d",
        "Metadata": {"n": "1"},
        "MetadataDirective": "REPLACE",
        "Tagging": "size=big",
        "TaggingDirective": "REPLACE",
        "StorageClass": "ONEZONE_IA",
    }
    s3.copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/source", **new)
    got = s3.get_object(Bucket=bucket, Key="copy")
    assert (got["ContentType"], got["Metadata"], got["StorageClass"]) == ("c/d", {"n": "1"}, "ONEZONE_IA")
    assert s3.get_object_tagging(Bucket=bucket, Key="copy")["TagSet"] == [{"Key": "size", "Value": "big"}]
    s3.copy_object(Bucket=bucket, Key="bare", CopySource=f"{bucket}/source", MetadataDirective="REPLACE")
    bare = s3.get_object(Bucket=bucket, Key="bare")
    assert (bare["ContentType"], bare["Metadata"], bare["TagCount"]) == ("binary/octet-stream", {}, 1)


def test_a_copy_to_itself_must_change_something(servers: Stack, bucket: str) -> None:
    s3 = servers.s3()
    same = {"Bucket": bucket, "Key": "source", "CopySource": f"{bucket}/source"}
    assert refused(s3.copy_object, **same) == (400, "InvalidRequest")
    s3.copy_object(**same, MetadataDirective="REPLACE", Metadata={"k": "2"})
    got = s3.get_object(Bucket=bucket, Key="source")
    assert (got["Body"].read(), got["Metadata"]) == (b"the bytes", {"k": "2"})
    s3.copy_object(**same, StorageClass="STANDARD")
    assert s3.head_object(Bucket=bucket, Key="source")["Metadata"] == {"k": "2"}
    s3.copy_object(**same, ChecksumAlgorithm="SHA256")
    assert "ChecksumSHA256" in s3.head_object(Bucket=bucket, Key="source", ChecksumMode="ENABLED")


@pytest.mark.parametrize("key", ["sp ace", "a+b", "\u00e9\u4e2d", "q?uery", "per%25cent", "a//b/../c"])
def test_the_source_is_named_as_it_is_stored(servers: Stack, bucket: str, key: str) -> None:
    s3 = servers.s3()
    s3.put_object(Bucket=bucket, Key=key, Body=key.encode())
    s3.copy_object(Bucket=bucket, Key="copy", CopySource={"Bucket": bucket, "Key": key})
    assert s3.get_object(Bucket=bucket, Key="copy")["Body"].read() == key.encode()


@pytest.mark.parametrize(
    ("source", "status", "code"),
    [
        ("{bucket}/absent", 404, "NoSuchKey"),
        ("no-such-bucket/source", 404, "NoSuchBucket"),
        ("{bucket}/source?versionId=null", 200, None),
        ("/{bucket}/source", 200, None),
        ("{bucket}%2Fsource", 200, None),
        ("{bucket}/source?versionId=x", 404, "NoSuchVersion"),
        ("{bucket}", 400, "InvalidArgument"),
        ("{bucket}/", 400, "InvalidArgument"),
        ("", 400, "InvalidArgument"),
        ("{bucket}/%ff", 400, "InvalidArgument"),
    ],
)
def test_sources_are_parsed_as_s3_does(servers: Stack, bucket: str, source: str, status: int, code: str | None) -> None:
    headers = {"x-amz-copy-source": source.format(bucket=bucket)}
    reply = servers.request("PUT", f"/{bucket}/parsed", headers=headers)
    assert reply.status == status, reply.body
    assert code is None or reply.code == code


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ({"CopySourceIfMatch": "here"}, True),
        ({"CopySourceIfMatch": OTHER_ETAG}, False),
        ({"CopySourceIfNoneMatch": "here"}, False),
        ({"CopySourceIfNoneMatch": OTHER_ETAG}, True),
        ({"CopySourceIfModifiedSince": PAST}, True),
        ({"CopySourceIfModifiedSince": FUTURE}, False),
        ({"CopySourceIfUnmodifiedSince": PAST}, False),
        ({"CopySourceIfUnmodifiedSince": FUTURE}, True),
        ({"IfNoneMatch": "*"}, False),
        ({"IfMatch": "target"}, True),
        ({"IfMatch": OTHER_ETAG}, False),
    ],
)
def test_copies_under_conditions(servers: Stack, bucket: str, condition: dict[str, Any], holds: bool) -> None:
    """The source's and the target's; what fails leaves the target as it was."""
    s3 = servers.s3()
    etags = {
        "here": s3.head_object(Bucket=bucket, Key="source")["ETag"],
        "target": s3.put_object(Bucket=bucket, Key="target", Body=b"old")["ETag"],
    }
    asked = {name: etags.get(value, value) if isinstance(value, str) else value for name, value in condition.items()}
    call = {"Bucket": bucket, "Key": "target", "CopySource": f"{bucket}/source", **asked}
    if holds:
        s3.copy_object(**call)
    else:
        assert refused(s3.copy_object, **call) == (412, "PreconditionFailed")
    expected = b"the bytes" if holds else b"old"
    assert s3.get_object(Bucket=bucket, Key="target")["Body"].read() == expected


def test_a_directive_is_copy_or_replace(servers: Stack, bucket: str) -> None:
    for name in ("x-amz-metadata-directive", "x-amz-tagging-directive"):
        headers = {"x-amz-copy-source": f"{bucket}/source", name: "KEEP"}
        reply = servers.request("PUT", f"/{bucket}/target", headers=headers)
        assert (reply.status, reply.code, reply.named_field) == (400, "InvalidArgument", name)


def test_a_multipart_object_is_copied_whole(servers: Stack, bucket: str) -> None:
    s3 = servers.s3()
    upload = {"Bucket": bucket, "Key": "parts"}
    upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
    bodies = [bytes([number]) * (5 << 20) for number in (1, 2)]
    etags = [s3.upload_part(**upload, PartNumber=n + 1, Body=body)["ETag"] for n, body in enumerate(bodies)]
    parts = [{"PartNumber": n + 1, "ETag": etag} for n, etag in enumerate(etags)]
    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    s3.copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/parts")
    assert s3.get_object(Bucket=bucket, Key="copy")["Body"].read() == b"".join(bodies)


@pytest.mark.slow
def test_a_copy_reads_and_writes_by_its_own_rights(tmp_path: Any) -> None:
    """To copy is to read: a key that may not GetObject from the source may not copy it out."""
    config = (
        CONFIG + '[[credentials]]\naccess_key = "WRITERKEY"\nsecret_key = "writer-secret-4"\nactions = ["PutObject"]\n'
    )
    with stack("together", tmp_path, config) as running:
        s3 = running.s3()
        s3.create_bucket(Bucket="private")
        s3.put_object(Bucket="private", Key="secret", Body=b"x")
        writer = running.s3(("WRITERKEY", "writer-secret-4"))
        writer.put_object(Bucket="private", Key="own", Body=b"y")
        copy = {"Bucket": "private", "Key": "stolen", "CopySource": "private/secret"}
        assert refused(writer.copy_object, **copy) == (403, "AccessDenied")
        upload = writer.create_multipart_upload(Bucket="private", Key="stolen")["UploadId"]
        assert refused(writer.upload_part_copy, **copy, UploadId=upload, PartNumber=1) == (403, "AccessDenied")
        assert refused(s3.head_object, Bucket="private", Key="stolen")[0] == 404


def test_the_answer_has_the_checksum(servers: Stack, bucket: str) -> None:
    s3 = servers.s3()
    done = s3.copy_object(Bucket=bucket, Key="c", CopySource=f"{bucket}/source", ChecksumAlgorithm="CRC64NVME")
    got = headers_of(s3.head_object(Bucket=bucket, Key="c", ChecksumMode="ENABLED"))
    assert got["x-amz-checksum-crc64nvme"] == done["CopyObjectResult"]["ChecksumCRC64NVME"]
