"""Multipart uploads."""

from __future__ import annotations

import hashlib
import os
import random
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any
from urllib.parse import unquote

import pytest

from tests.support.requests import OWNER
from tests.support.s3_calls import PART, Uploading, fresh_bucket, headers_of, refused, status_of
from tests.support.servers import Stack


@pytest.fixture
def bucket(servers: Stack) -> str:
    return fresh_bucket(servers)


def test_parts_in_any_order_and_in_parallel_make_one_object(servers: Stack, bucket: str) -> None:
    """Numbers may have gaps; the ETag is S3's: the MD5 of the parts' MD5s, and their count."""
    s3 = servers.s3()
    options = {"ContentType": "a/b", "Metadata": {"k": "v"}, "Tagging": "t=1", "StorageClass": "STANDARD_IA"}
    upload = Uploading(s3, bucket, "joined", options)
    bodies = {number: os.urandom(PART) for number in (2, 5, 9)} | {10_000: os.urandom(777)}
    numbers = list(bodies)
    random.Random(1).shuffle(numbers)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: upload.put(number, bodies[number]), numbers))
    assert refused(s3.head_object, Bucket=bucket, Key="joined")[0] == 404
    done = upload.complete()
    digests = b"".join(hashlib.md5(bodies[number]).digest() for number in sorted(bodies))
    assert done["ETag"] == f'"{hashlib.md5(digests).hexdigest()}-4"'
    assert (done["Bucket"], done["Key"]) == (bucket, "joined")
    assert done["Location"].endswith(f"/{bucket}/joined")
    got = s3.get_object(Bucket=bucket, Key="joined")
    whole = b"".join(bodies[number] for number in sorted(bodies))
    assert got["Body"].read() == whole
    assert (got["ETag"], got["ContentType"], got["Metadata"]) == (done["ETag"], "a/b", {"k": "v"})
    assert (got["TagCount"], got["StorageClass"]) == (1, "STANDARD_IA")
    across = s3.get_object(Bucket=bucket, Key="joined", Range=f"bytes={PART - 10}-{PART + 9}")
    assert across["Body"].read() == whole[PART - 10 : PART + 10]
    assert refused(s3.list_parts, **upload.name) == (404, "NoSuchUpload")


def test_one_part_of_an_object_can_be_read(servers: Stack, bucket: str) -> None:
    s3 = servers.s3()
    upload = Uploading(s3, bucket, "parts")
    bodies = [os.urandom(PART), os.urandom(10)]
    for index, body in enumerate(bodies):
        upload.put(index + 1, body)
    etag = upload.complete()["ETag"]
    for index, body in enumerate(bodies):
        for call in (s3.get_object, s3.head_object):
            got = call(Bucket=bucket, Key="parts", PartNumber=index + 1)
            assert (got["PartsCount"], got["ContentLength"], got["ETag"]) == (2, len(body), etag)
            assert status_of(got) == 206
        assert s3.get_object(Bucket=bucket, Key="parts", PartNumber=index + 1)["Body"].read() == body
    assert refused(s3.get_object, Bucket=bucket, Key="parts", PartNumber=3) == (416, "InvalidPartNumber")


def test_a_part_sent_again_replaces_the_first(servers: Stack, bucket: str) -> None:
    upload = Uploading(servers.s3(), bucket, "again")
    upload.put(1, b"first")
    upload.put(1, b"second")
    upload.complete()
    assert servers.s3().get_object(Bucket=bucket, Key="again")["Body"].read() == b"second"


def test_completing_twice_gives_the_same_answer(servers: Stack, bucket: str) -> None:
    """The first answer may have been lost on its way."""
    upload = Uploading(servers.s3(), bucket, "twice")
    upload.put(1, b"x")
    assert upload.complete()["ETag"] == upload.complete()["ETag"]


def test_completion_is_checked(servers: Stack, bucket: str) -> None:
    """What is refused leaves the upload as it was."""
    s3 = servers.s3()
    upload = Uploading(s3, bucket, "checked")
    upload.put(1, b"too small to be followed")
    upload.put(2, b"x")

    def complete(*parts: tuple[int, str], **options: Any) -> tuple[int, str]:
        listed = [{"PartNumber": number, "ETag": etag} for number, etag in parts]
        call = {**upload.name, "MultipartUpload": {"Parts": listed}}
        return refused(s3.complete_multipart_upload, **call, **options)

    first, second = upload.etags[1], upload.etags[2]
    assert complete((1, first), (2, second)) == (400, "EntityTooSmall")
    assert complete((2, second), (1, first)) == (400, "InvalidPartOrder")
    assert complete((1, first), (1, first)) == (400, "InvalidPartOrder")
    assert complete((1, second)) == (400, "InvalidPart")
    assert complete((3, first)) == (400, "InvalidPart")
    assert complete() == (400, "MalformedXML")
    assert complete((1, first), MpuObjectSize=3) == (400, "InvalidRequest")
    target = f"/{bucket}/checked?uploadId={upload.name['UploadId']}"
    for body in (b"", b"<", b"<CompleteMultipartUpload/>", b"<X/>"):
        assert servers.request("POST", target, body=body).code == "MalformedXML"
    bare = first.strip('"')
    document = (
        f"<CompleteMultipartUpload><Part><ETag>{bare}</ETag><PartNumber>1</PartNumber></Part></CompleteMultipartUpload>"
    )
    assert servers.request("POST", target, body=document.encode()).status == 200


def test_an_upload_that_is_not_there_says_so(servers: Stack, bucket: str) -> None:
    s3 = servers.s3()
    upload = Uploading(s3, bucket, "gone")
    upload.put(1, b"x")
    assert status_of(s3.abort_multipart_upload(**upload.name)) == 204
    for name in (upload.name, {**upload.name, "UploadId": "never"}, {**upload.name, "UploadId": "x" * 2000}):
        assert refused(s3.upload_part, **name, PartNumber=1, Body=b"x") == (404, "NoSuchUpload")
        assert refused(s3.list_parts, **name) == (404, "NoSuchUpload")
        assert refused(s3.abort_multipart_upload, **name) == (404, "NoSuchUpload")
        parts = {"Parts": [{"PartNumber": 1, "ETag": "x"}]}
        assert refused(s3.complete_multipart_upload, **name, MultipartUpload=parts) == (404, "NoSuchUpload")
    other = Uploading(s3, bucket, "mine")
    assert refused(s3.upload_part, **{**other.name, "Key": "other"}, PartNumber=1, Body=b"x") == (404, "NoSuchUpload")


@pytest.mark.parametrize("number", ["0", "10001", "x", "-1", ""])
def test_part_numbers_are_1_to_10000(servers: Stack, bucket: str, number: str) -> None:
    upload = Uploading(servers.s3(), bucket, "numbers")
    target = f"/{bucket}/numbers?partNumber={number}&uploadId={upload.name['UploadId']}"
    reply = servers.request("PUT", target, body=b"x")
    assert (reply.status, reply.code, reply.named_field) == (400, "InvalidArgument", "partNumber")


def test_part_number_and_upload_go_together(servers: Stack, bucket: str) -> None:
    """A part number without its upload must not become an object."""
    assert servers.request("PUT", f"/{bucket}/loose?partNumber=1", body=b"x").code == "InvalidArgument"
    assert servers.request("PUT", f"/{bucket}/loose?uploadId=x", body=b"x").code == "InvalidArgument"
    assert servers.request("HEAD", f"/{bucket}/loose").status == 404


def test_an_empty_part_with_an_rdma_token_is_no_part(servers: Stack, bucket: str) -> None:
    upload = Uploading(servers.s3(), bucket, "token")
    target = f"/{bucket}/token?partNumber=1&uploadId={upload.name['UploadId']}"
    for name in ("x-amz-rdma-token", "x-rdma-info", "x-scal-rdma"):
        assert servers.request("PUT", target, headers={name: "opaque"}).code == "NotImplemented"
    assert "Parts" not in servers.s3().list_parts(**upload.name)


def test_parts_are_copied_from_objects(servers: Stack, bucket: str) -> None:
    s3, body = servers.s3(), os.urandom(PART + 1000)
    s3.put_object(Bucket=bucket, Key="source", Body=body)
    upload = Uploading(s3, bucket, "copied")

    def copy(number: int, **options: Any) -> dict[str, Any]:
        name = {**upload.name, "PartNumber": number, "CopySource": f"{bucket}/source"}
        answer: dict[str, Any] = s3.upload_part_copy(**name, **options)["CopyPartResult"]
        upload.etags[number] = answer["ETag"]
        return answer

    assert copy(1)["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'
    copy(2, CopySourceRange="bytes=10-19")
    upload.complete()
    assert s3.get_object(Bucket=bucket, Key="copied")["Body"].read() == body + body[10:20]


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("bytes=0-", 400, "InvalidArgument"),
        ("bytes=-5", 400, "InvalidArgument"),
        ("bytes=0-2,3-5", 400, "InvalidArgument"),
        ("0-2", 400, "InvalidArgument"),
        ("bytes=3-2", 400, "InvalidArgument"),
        ("bytes=hello-world", 400, "InvalidArgument"),
        ("bytes=0-10", 400, "InvalidArgument"),
        ("bytes=10-11", 400, "InvalidArgument"),
    ],
)
def test_a_copied_range_lies_inside_its_source(servers: Stack, bucket: str, text: str, status: int, code: str) -> None:
    """Clipping it would make a part of another size than was asked for."""
    s3 = servers.s3()
    s3.put_object(Bucket=bucket, Key="ten", Body=b"0123456789")
    upload = Uploading(s3, bucket, "range")
    call = {**upload.name, "PartNumber": 1, "CopySource": f"{bucket}/ten"}
    assert refused(s3.upload_part_copy, **call, CopySourceRange=text) == (status, code)
    s3.upload_part_copy(
        **call, CopySourceRange="bytes=0-9", CopySourceIfMatch=s3.head_object(Bucket=bucket, Key="ten")["ETag"]
    )
    assert refused(s3.upload_part_copy, **call, CopySourceIfMatch='"0"') == (412, "PreconditionFailed")


def test_parts_are_listed_in_pages(servers: Stack, bucket: str) -> None:
    s3 = servers.s3()
    upload = Uploading(s3, bucket, "listed", {"StorageClass": "STANDARD_IA"})
    assert "Parts" not in s3.list_parts(**upload.name)
    bodies = {number: bytes(number) for number in (1, 2, 3, 7, 11)}
    for number, body in bodies.items():
        upload.put(number, body)
    for size in (1, 2, 1000):
        pages = list(s3.get_paginator("list_parts").paginate(**upload.name, PaginationConfig={"PageSize": size}))
        found = [part for page in pages for part in page["Parts"]]
        assert [(p["PartNumber"], p["Size"], p["ETag"]) for p in found] == [
            (number, len(body), upload.etags[number]) for number, body in bodies.items()
        ]
    page = s3.list_parts(**upload.name, MaxParts=2, PartNumberMarker=1)
    assert (page["IsTruncated"], page["PartNumberMarker"], page["NextPartNumberMarker"]) == (True, 1, 3)
    assert (page["StorageClass"], page["Owner"]["ID"], page["Initiator"]["ID"]) == ("STANDARD_IA", OWNER[0], OWNER[0])


def test_uploads_are_listed_in_pages(servers: Stack, bucket: str) -> None:
    """By key, and for one key by when they began."""
    s3 = servers.s3()
    keys = ["a", "b/1", "b/2", "c c&", "c c&", "d"]
    made = [(key, Uploading(s3, bucket, key).name["UploadId"]) for key in keys]
    paginator = s3.get_paginator("list_multipart_uploads")
    for size in (1, 2, 1000):
        pages = list(paginator.paginate(Bucket=bucket, PaginationConfig={"PageSize": size}))
        assert [(u["Key"], u["UploadId"]) for page in pages for u in page.get("Uploads", [])] == made
        pages = list(paginator.paginate(Bucket=bucket, Delimiter="/", PaginationConfig={"PageSize": size}))
        found = [(u["Key"], u["UploadId"]) for page in pages for u in page.get("Uploads", [])]
        assert found == [upload for upload in made if "/" not in upload[0]]
        assert [p["Prefix"] for page in pages for p in page.get("CommonPrefixes", [])] == ["b/"]
    encoded = s3.list_multipart_uploads(Bucket=bucket, EncodingType="url")["Uploads"]
    assert [unquote(upload["Key"]) for upload in encoded] == keys
    assert encoded[3]["Key"] == "c%20c%26"
    inside = s3.list_multipart_uploads(Bucket=bucket, Prefix="b/")
    assert [upload["Key"] for upload in inside["Uploads"]] == ["b/1", "b/2"]
    assert inside["Uploads"][0]["Initiator"]["ID"] == OWNER[0]


def test_a_key_xml_cannot_hold_can_be_uploaded_in_parts(servers: Stack, bucket: str) -> None:
    """The answers name the key; a client must still be able to read the rest of them."""
    upload = Uploading(servers.s3(), bucket, "c\x01")
    upload.put(1, b"x")
    assert servers.s3().list_parts(**upload.name)["Parts"][0]["Size"] == 1
    upload.complete()
    assert servers.s3().get_object(Bucket=bucket, Key="c\x01")["Body"].read() == b"x"


def test_a_bucket_with_only_unfinished_uploads_can_go(servers: Stack, bucket: str) -> None:
    upload = Uploading(servers.s3(), bucket, "left")
    upload.put(1, b"x")
    servers.s3().delete_bucket(Bucket=bucket)
    assert refused(servers.s3().list_parts, **upload.name)[0] == 404


def test_attributes_name_the_parts(servers: Stack, bucket: str) -> None:
    s3 = servers.s3()
    upload = Uploading(s3, bucket, "attributes", {"ChecksumAlgorithm": "SHA256"})
    for number, size in ((1, PART), (2, PART), (4, 9)):
        upload.put(number, os.urandom(size), ChecksumAlgorithm="SHA256")
    listed = s3.list_parts(**upload.name)["Parts"]
    parts = [{name: part[name] for name in ("PartNumber", "ETag", "ChecksumSHA256")} for part in listed]
    done = s3.complete_multipart_upload(**upload.name, MultipartUpload={"Parts": parts})
    wanted = ["ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"]
    got = s3.get_object_attributes(Bucket=bucket, Key="attributes", ObjectAttributes=wanted)
    assert (got["ETag"], got["ObjectSize"], got["StorageClass"]) == (done["ETag"].strip('"'), 2 * PART + 9, "STANDARD")
    assert got["Checksum"] == {"ChecksumSHA256": done["ChecksumSHA256"], "ChecksumType": "COMPOSITE"}
    assert got["ObjectParts"]["TotalPartsCount"] == 3
    found = [(p["PartNumber"], p["Size"], p["ChecksumSHA256"]) for p in got["ObjectParts"]["Parts"]]
    assert [(size, checksum) for _, size, checksum in found] == [(p["Size"], p["ChecksumSHA256"]) for p in listed]
    page = s3.get_object_attributes(
        Bucket=bucket, Key="attributes", ObjectAttributes=["ObjectParts"], MaxParts=1, PartNumberMarker=found[0][0]
    )["ObjectParts"]
    assert (page["IsTruncated"], page["MaxParts"], page["PartNumberMarker"]) == (True, 1, found[0][0])
    assert [part["PartNumber"] for part in page["Parts"]] == [page["NextPartNumberMarker"]] == [found[1][0]]


def test_attributes_of_an_object_stored_whole(servers: Stack, bucket: str) -> None:
    s3 = servers.s3()
    s3.put_object(Bucket=bucket, Key="whole", Body=b"abc", ChecksumAlgorithm="CRC32C")
    wanted = ["ETag", "Checksum", "ObjectParts", "ObjectSize"]
    got = s3.get_object_attributes(Bucket=bucket, Key="whole", ObjectAttributes=wanted)
    assert (got["ETag"], got["ObjectSize"]) == (hashlib.md5(b"abc").hexdigest(), 3)
    assert got["Checksum"]["ChecksumType"] == "FULL_OBJECT"
    assert "ObjectParts" not in got
    assert "StorageClass" not in got
    for headers in ({}, {"x-amz-object-attributes": "Nonsense"}):
        reply = servers.request("GET", f"/{bucket}/whole?attributes", headers=headers)
        assert (reply.status, reply.code, reply.named_field) == (400, "InvalidArgument", "x-amz-object-attributes")
    answer = refused(s3.get_object_attributes, Bucket=bucket, Key="absent", ObjectAttributes=["ETag"])
    assert answer == (404, "NoSuchKey")


def test_the_managed_transfer_of_boto3(servers: Stack, bucket: str) -> None:
    """What most programs call: parallel parts up, parallel ranges down."""
    s3, body = servers.s3(), os.urandom(20_000_001)
    s3.upload_fileobj(BytesIO(body), bucket, "managed")
    assert headers_of(s3.head_object(Bucket=bucket, Key="managed"))["etag"].endswith('-3"')
    into = BytesIO()
    s3.download_fileobj(bucket, "managed", into)
    assert into.getvalue() == body
    s3.copy({"Bucket": bucket, "Key": "managed"}, bucket, "managed-copy")
    assert s3.get_object(Bucket=bucket, Key="managed-copy")["Body"].read() == body


@pytest.mark.slow
def test_parts_copied_while_others_read_are_the_sources_bytes(servers: Stack) -> None:
    """Read buffers are used again: what a part is made of must not be another reader's."""
    s3 = servers.s3()
    s3.create_bucket(Bucket="copied-parts")
    bodies = {f"k{index}": os.urandom(3_000_000 + 77_777 * index) for index in range(3)}
    for key, body in bodies.items():
        s3.put_object(Bucket="copied-parts", Key=key, Body=body)
    upload = s3.create_multipart_upload(Bucket="copied-parts", Key="to")["UploadId"]

    def copy(number: int) -> None:
        source = f"k{number % 3}"
        target = {"Bucket": "copied-parts", "Key": "to", "UploadId": upload, "PartNumber": number}
        part = s3.upload_part_copy(**target, CopySource={"Bucket": "copied-parts", "Key": source})
        assert part["CopyPartResult"]["ETag"] == f'"{hashlib.md5(bodies[source]).hexdigest()}"'

    def read(number: int) -> None:
        key = f"k{number % 3}"
        assert servers.request("GET", f"/copied-parts/{key}").body == bodies[key]

    with ThreadPoolExecutor(8) as pool:
        tasks = [pool.submit(copy if number % 2 else read, number) for number in range(1, 60)]
        for task in tasks:
            task.result()
