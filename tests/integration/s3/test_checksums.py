"""Checksums: kept, given back, compared; whole objects and parts."""

from __future__ import annotations

import base64
import hashlib
import os
from typing import Any

import pytest
from awscrt import checksums

from tests.support.s3_calls import fresh_bucket, headers_of, refused
from tests.support.servers import Stack

ALGORITHMS = ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"]
PART = 5 << 20


def checksum(algorithm: str, data: bytes) -> str:
    """The checksum as S3 writes it, by other code than the server's where there is some."""
    digest = {
        "CRC32": lambda: checksums.crc32(data).to_bytes(4, "big"),
        "CRC32C": lambda: checksums.crc32c(data).to_bytes(4, "big"),
        "CRC64NVME": lambda: checksums.crc64nvme(data).to_bytes(8, "big"),
        "SHA1": lambda: hashlib.sha1(data).digest(),
        "SHA256": lambda: hashlib.sha256(data).digest(),
    }[algorithm]()
    return base64.b64encode(digest).decode()


def composite(algorithm: str, bodies: list[bytes]) -> str:
    joined = b"".join(base64.b64decode(checksum(algorithm, body)) for body in bodies)
    return f"{checksum(algorithm, joined)}-{len(bodies)}"


@pytest.fixture
def bucket(servers: Stack) -> str:
    return fresh_bucket(servers)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_checksum_is_kept_and_given_back_when_asked_for(servers: Stack, bucket: str, algorithm: str) -> None:
    s3, body = servers.s3(), os.urandom(70_000)
    put = s3.put_object(Bucket=bucket, Key="k", Body=body, ChecksumAlgorithm=algorithm)
    expected = checksum(algorithm, body)
    assert (put[f"Checksum{algorithm}"], put["ChecksumType"]) == (expected, "FULL_OBJECT")
    for call in (s3.get_object, s3.head_object):
        got = call(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
        assert (got[f"Checksum{algorithm}"], got["ChecksumType"]) == (expected, "FULL_OBJECT")
    header = f"x-amz-checksum-{algorithm.lower()}"
    assert header not in servers.request("GET", f"/{bucket}/k").headers
    part = servers.request("GET", f"/{bucket}/k", headers={"range": "bytes=0-9", "x-amz-checksum-mode": "ENABLED"})
    assert (part.status, header in part.headers) == (206, False)
    s3.copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/k")
    assert s3.head_object(Bucket=bucket, Key="copy", ChecksumMode="ENABLED")[f"Checksum{algorithm}"] == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_body_with_another_checksum_is_not_stored(servers: Stack, bucket: str, algorithm: str) -> None:
    header = f"x-amz-checksum-{algorithm.lower()}"
    wrong = servers.request("PUT", f"/{bucket}/w", body=b"body", headers={header: checksum(algorithm, b"other")})
    assert (wrong.status, wrong.code) == (400, "BadDigest")
    nonsense = servers.request("PUT", f"/{bucket}/w", body=b"body", headers={header: "AAAA"})
    assert (nonsense.status, nonsense.code) == (400, "InvalidRequest")
    assert servers.request("HEAD", f"/{bucket}/w").status == 404


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        ("CRC32", "COMPOSITE"),
        ("CRC32C", "COMPOSITE"),
        ("SHA1", "COMPOSITE"),
        ("SHA256", "COMPOSITE"),
        ("CRC32", "FULL_OBJECT"),
        ("CRC32C", "FULL_OBJECT"),
        ("CRC64NVME", "FULL_OBJECT"),
    ],
)
def test_multipart_checksums_of_both_kinds(servers: Stack, bucket: str, algorithm: str, kind: str) -> None:
    s3, bodies = servers.s3(), [os.urandom(PART), os.urandom(PART + 3), os.urandom(1)]
    name: dict[str, Any] = {"Bucket": bucket, "Key": "k"}
    created = s3.create_multipart_upload(**name, ChecksumAlgorithm=algorithm, ChecksumType=kind)
    assert (created["ChecksumAlgorithm"], created["ChecksumType"]) == (algorithm, kind)
    name["UploadId"] = created["UploadId"]
    parts = []
    for number, body in enumerate(bodies, 1):
        sent = s3.upload_part(**name, PartNumber=number, Body=body, ChecksumAlgorithm=algorithm)
        assert sent[f"Checksum{algorithm}"] == checksum(algorithm, body)
        parts.append({"PartNumber": number, "ETag": sent["ETag"], f"Checksum{algorithm}": sent[f"Checksum{algorithm}"]})
    listed = s3.list_parts(**name)
    assert (listed["ChecksumAlgorithm"], listed["ChecksumType"]) == (algorithm, kind)
    assert [part[f"Checksum{algorithm}"] for part in listed["Parts"]] == [checksum(algorithm, b) for b in bodies]
    under_way = s3.list_multipart_uploads(Bucket=bucket)["Uploads"][0]
    assert (under_way["ChecksumAlgorithm"], under_way["ChecksumType"]) == (algorithm, kind)
    expected = composite(algorithm, bodies) if kind == "COMPOSITE" else checksum(algorithm, b"".join(bodies))
    complete = {**name, "MultipartUpload": {"Parts": parts}, "ChecksumType": kind}
    wrong = checksum(algorithm, b"wrong") + ("-3" if kind == "COMPOSITE" else "")
    assert refused(s3.complete_multipart_upload, **complete, **{f"Checksum{algorithm}": wrong}) == (400, "BadDigest")
    other = "FULL_OBJECT" if kind == "COMPOSITE" else "COMPOSITE"
    answer = refused(s3.complete_multipart_upload, **{**complete, "ChecksumType": other})
    assert answer == (400, "InvalidRequest")
    done = s3.complete_multipart_upload(**complete, **{f"Checksum{algorithm}": expected})
    assert (done[f"Checksum{algorithm}"], done["ChecksumType"]) == (expected, kind)
    got = s3.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert got["Body"].read() == b"".join(bodies)
    assert (got[f"Checksum{algorithm}"], got["ChecksumType"]) == (expected, kind)
    one = s3.get_object(Bucket=bucket, Key="k", PartNumber=2, ChecksumMode="ENABLED")
    assert one["Body"].read() == bodies[1]
    assert one.get(f"Checksum{algorithm}") in (None, checksum(algorithm, bodies[1]))


def test_a_part_claimed_with_another_checksum_is_refused(servers: Stack, bucket: str) -> None:
    s3 = servers.s3()
    name = {"Bucket": bucket, "Key": "k"}
    name["UploadId"] = s3.create_multipart_upload(**name, ChecksumAlgorithm="CRC32C")["UploadId"]
    part = s3.upload_part(**name, PartNumber=1, Body=b"x", ChecksumAlgorithm="CRC32C")
    claimed = {"PartNumber": 1, "ETag": part["ETag"], "ChecksumCRC32C": checksum("CRC32C", b"y")}
    answer = refused(s3.complete_multipart_upload, **name, MultipartUpload={"Parts": [claimed]})
    assert answer == (400, "InvalidPart")
    copied = s3.upload_part_copy
    s3.put_object(Bucket=bucket, Key="source", Body=b"copied")
    result = copied(**name, PartNumber=1, CopySource=f"{bucket}/source")["CopyPartResult"]
    assert result["ChecksumCRC32C"] == checksum("CRC32C", b"copied")


@pytest.mark.parametrize(
    "headers",
    [
        {"x-amz-checksum-algorithm": "MD5"},
        {"x-amz-checksum-algorithm": "CRC64NVME", "x-amz-checksum-type": "COMPOSITE"},
        {"x-amz-checksum-algorithm": "SHA1", "x-amz-checksum-type": "FULL_OBJECT"},
        {"x-amz-checksum-algorithm": "SHA256", "x-amz-checksum-type": "FULL_OBJECT"},
        {"x-amz-checksum-algorithm": "CRC32", "x-amz-checksum-type": "HALF"},
        {"x-amz-checksum-type": "COMPOSITE"},
    ],
    ids=str,
)
def test_pairs_s3_does_not_know_are_refused(servers: Stack, bucket: str, headers: dict[str, str]) -> None:
    reply = servers.request("POST", f"/{bucket}/k?uploads", headers=headers)
    assert (reply.status, reply.code) == (400, "InvalidRequest")


def test_the_type_has_a_default_by_algorithm(servers: Stack, bucket: str) -> None:
    for algorithm in ALGORITHMS:
        created = servers.s3().create_multipart_upload(Bucket=bucket, Key="k", ChecksumAlgorithm=algorithm)
        assert created["ChecksumType"] == ("FULL_OBJECT" if algorithm == "CRC64NVME" else "COMPOSITE")


def test_content_md5_is_compared(servers: Stack, bucket: str) -> None:
    right = base64.b64encode(hashlib.md5(b"body").digest()).decode()
    reply = servers.request("PUT", f"/{bucket}/m", body=b"body", headers={"content-md5": right})
    assert reply.status == 200
    wrong = base64.b64encode(hashlib.md5(b"other").digest()).decode()
    assert servers.request("PUT", f"/{bucket}/m", body=b"body", headers={"content-md5": wrong}).code == "BadDigest"
    assert servers.request("PUT", f"/{bucket}/m", body=b"body", headers={"content-md5": "!"}).code == "InvalidDigest"
    got = servers.s3().head_object(Bucket=bucket, Key="m")
    assert headers_of(got)["etag"] == f'"{hashlib.md5(b"body").hexdigest()}"'
