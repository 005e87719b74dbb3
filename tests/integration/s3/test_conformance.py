"""Answers the public S3 conformance suites ask for and no client of ours depends on."""

from __future__ import annotations

import hashlib

import boto3
import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from tests.support.requests import OWNER
from tests.support.s3_calls import PART, Uploading, fresh_bucket, refused, status_of
from tests.support.servers import Stack
from tests.support.small_gateway import KEY, head_of, sent, signed_headers, small_gateway


@pytest.fixture
def bucket(servers: Stack) -> str:
    return fresh_bucket(servers)


def test_the_service_itself_can_only_be_listed(servers: Stack) -> None:
    for method in ("HEAD", "PUT", "POST", "DELETE"):
        assert servers.request(method, "/").status == 405


def test_a_name_no_bucket_can_have_is_said_to_be_that(servers: Stack) -> None:
    """Not only when one is to be made: whoever mistyped it should not look for a missing bucket."""
    for method, target in (("GET", "/under_score"), ("HEAD", "/UPPER"), ("DELETE", "/a..b"), ("PUT", "/a..b/key")):
        reply = servers.request(method, target)
        assert reply.status == 400
        assert method == "HEAD" or reply.code == "InvalidBucketName"


def test_times_in_documents_and_headers_are_of_the_same_second(servers: Stack, bucket: str) -> None:
    """Headers have no milliseconds."""
    s3 = servers.s3()
    s3.put_object(Bucket=bucket, Key="k")
    listed = s3.list_objects_v2(Bucket=bucket)["Contents"][0]["LastModified"]
    assert listed.replace(microsecond=0) == s3.head_object(Bucket=bucket, Key="k")["LastModified"]


def test_a_wrong_region_is_answered_with_the_right_one(servers: Stack, bucket: str) -> None:
    """Clients that find it sign again: boto3 does so by itself."""

    def elsewhere(headers: dict[str, str]) -> None:
        headers["Authorization"] = headers["Authorization"].replace("/us-east-1/", "/eu-west-1/")

    reply = servers.request("GET", f"/{bucket}", change=elsewhere)
    assert (reply.status, reply.code) == (400, "AuthorizationHeaderMalformed")
    assert b"<Region>us-east-1</Region>" in reply.body
    abroad = boto3.client(
        "s3",
        endpoint_url=servers.url,
        region_name="eu-west-1",
        aws_access_key_id=OWNER[0],
        aws_secret_access_key=OWNER[1],
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 0}),
    )
    assert status_of(abroad.list_objects_v2(Bucket=bucket)) == 200


def test_what_proves_no_identity_is_denied(servers: Stack, bucket: str) -> None:
    for name, value in (("Authorization", ""), ("X-Amz-Date", ""), ("X-Amz-Date", "Sat, 21 Nov 2026 00:00:00 GMT")):
        reply = servers.request("GET", f"/{bucket}", change=lambda headers: headers.update({name: value}))  # noqa: B023
        assert (reply.status, reply.code) == (403, "AccessDenied")


def test_a_clock_far_off_is_said_to_be_that(servers: Stack, bucket: str) -> None:
    """Also where the date no longer fits the credential's scope: which clock is wrong helps more."""
    for date in ("20100707T215304Z", "20500707T215304Z"):
        reply = servers.request("GET", f"/{bucket}", change=lambda headers: headers.update({"X-Amz-Date": date}))  # noqa: B023
        assert (reply.status, reply.code) == (403, "RequestTimeTooSkewed")


def test_a_missing_payload_hash_is_missed(servers: Stack, bucket: str) -> None:
    """Not a wrong signature: what the client signed in its place cannot be known."""
    reply = servers.request(
        "GET", f"/{bucket}", body=b"signed as if there were a body", sent_body=b"", change=without_hash
    )
    assert (reply.status, reply.code, reply.named_field) == (400, "InvalidRequest", "x-amz-content-sha256")


def without_hash(headers: dict[str, str]) -> None:
    del headers["X-Amz-Content-SHA256"]


def test_a_payload_hash_may_be_in_capitals() -> None:
    body = b"in capitals"
    with small_gateway() as gateway:
        for sent_body, code in ((body, None), (b"In capitals", "XAmzContentSHA256Mismatch")):
            head = signed_headers("PUT", "/b/k", {}, hashlib.sha256(body).hexdigest().upper())
            head["Content-Length"] = str(len(body))
            assert sent(gateway.url, head_of("PUT", "/b/k", head), sent_body).code == code


def test_a_checksum_that_is_not_canonical_base64_stores_nothing(servers: Stack, bucket: str) -> None:
    """Bits that decode to nothing must be zero, or one checksum would have several spellings."""
    for value, status in (("AAAAAA==", 200), ("AAAAAB==", 400)):
        reply = servers.request("PUT", f"/{bucket}/{status}", headers={"x-amz-checksum-crc32": value})
        assert reply.status == status
    listed = servers.s3().list_objects_v2(Bucket=bucket)
    assert [entry["Key"] for entry in listed["Contents"]] == ["200"]


def test_an_archive_to_be_unpacked_is_refused(servers: Stack, bucket: str) -> None:
    """Stored as it is, the client would take its members for stored."""
    s3 = servers.s3()
    wanted = {"snowball-auto-extract": "true"}
    assert refused(s3.put_object, Bucket=bucket, Key="a.tar", Metadata=wanted) == (501, "NotImplemented")
    s3.put_object(Bucket=bucket, Key="a.tar", Metadata={"snowball-auto-extract": "false"})


def test_parts_of_an_object_are_counted_not_named(servers: Stack, bucket: str) -> None:
    """An object has parts 1 to n, whatever numbers they were uploaded under."""
    s3 = servers.s3()
    upload = Uploading(s3, bucket, "gaps")
    upload.put(3, b"a" * PART)
    upload.put(1000, b"b")
    upload.complete()
    named = {"Bucket": bucket, "Key": "gaps"}
    first, second = (s3.get_object(**named, PartNumber=number) for number in (1, 2))
    assert (first["Body"].read(), second["Body"].read()) == (b"a" * PART, b"b")
    assert (first["PartsCount"], second["ContentRange"]) == (2, f"bytes {PART}-{PART}/{PART + 1}")
    for number in (3, 1000):
        assert refused(s3.get_object, **named, PartNumber=number) == (416, "InvalidPartNumber")
    for number in (0, 10_001):
        assert refused(s3.get_object, **named, PartNumber=number) == (400, "InvalidArgument")


def test_a_completion_can_be_repeated_but_not_changed(servers: Stack, bucket: str) -> None:
    s3 = servers.s3()
    upload = Uploading(s3, bucket, "again")
    upload.put(1, b"a" * PART)
    upload.put(2, b"b")
    whole, done = upload.parts(), upload.complete()
    assert s3.complete_multipart_upload(**whole)["ETag"] == done["ETag"]
    parts = whole["MultipartUpload"]["Parts"]
    for other in (parts[:1], [{"PartNumber": 1, "ETag": '"no hex"'}]):
        changed = {**upload.name, "MultipartUpload": {"Parts": other}}
        assert refused(s3.complete_multipart_upload, **changed) == (404, "NoSuchUpload")
    assert s3.head_object(Bucket=bucket, Key="again")["ContentLength"] == PART + 1


def test_a_wrong_argument_is_repeated(servers: Stack, bucket: str) -> None:
    for target, headers, value in (
        (f"/{bucket}?max-keys=-1", {}, b"-1"),
        (f"/{bucket}?list-type=2&max-keys=blah", {}, b"blah"),
        (f"/{bucket}/k?partNumber=0", {}, b"0"),
        (f"/{bucket}/k", {"x-amz-copy-source": "no-slash"}, b"no-slash"),
    ):
        reply = servers.request("PUT" if headers else "GET", target, headers=headers)
        assert (reply.status, reply.code) == (400, "InvalidArgument")
        assert b"<ArgumentValue>" + value + b"</ArgumentValue>" in reply.body


def test_a_payload_hash_that_is_none_only_spoils_a_presigned_body() -> None:
    """A presigned request need not have one, and without a body nothing depends on it."""
    with small_gateway() as gateway:
        target = presigned("GET", "/b/k")
        assert (
            sent(gateway.url, head_of("GET", target, {"Host": "h", "x-amz-content-sha256": "junk"}), b"").status == 404
        )
        target = presigned("PUT", "/b/k")
        headers = {"Host": "h", "Content-Length": "1", "x-amz-content-sha256": "junk"}
        assert sent(gateway.url, head_of("PUT", target, headers), b"x").code == "InvalidArgument"


class JunkQueryAuth(S3SigV4QueryAuth):  # type: ignore[misc]
    """Presigns over a payload hash that is none."""

    def payload(self, request: AWSRequest) -> str:
        return "junk"


def presigned(method: str, target: str) -> str:
    aws = AWSRequest(method=method, url=f"http://h{target}")
    JunkQueryAuth(Credentials(*KEY), "s3", "us-east-1", expires=60).add_auth(aws)
    return str(aws.url).removeprefix("http://h")
