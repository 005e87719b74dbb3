"""Objects: bytes, headers, metadata, ranges, parts, deletes, ACLs."""

from __future__ import annotations

import base64
import hashlib
import os
import urllib.request
from email.header import decode_header

import pytest
from botocore.client import BaseClient

from tests.support.requests import OWNER, s3_client
from tests.support.s3_calls import fresh_bucket, headers_of, refused, status_of
from tests.support.servers import Stack

KEYS = [
    "plain",
    "/leading//double/",
    "./a/../b",
    "sp ace+plus&and=eq?quest#hash%25per",
    "quote\"'<>\\",
    "tab\tnew\nline\rreturn",
    "control\x01\x1f\x7f",
    "nul\0byte",
    "\u00e9\u4e2d\U0001f600",
    "e\u0301 not normalised",
    "~tilde*star(paren)!",
    "k" * 1024,
]


@pytest.mark.parametrize("key", KEYS, ids=[f"key{index}" for index in range(len(KEYS))])
def test_any_key_of_utf8_bytes_names_an_object(servers: Stack, key: str) -> None:
    """Put, get, head, list, delete: the same name everywhere."""
    s3, body = servers.s3(), os.urandom(100)
    bucket = fresh_bucket(servers)
    s3.put_object(Bucket=bucket, Key=key, Body=body)
    assert s3.get_object(Bucket=bucket, Key=key)["Body"].read() == body
    assert s3.head_object(Bucket=bucket, Key=key)["ContentLength"] == 100
    assert [entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket)["Contents"]] == [key]
    assert [entry["Key"] for entry in s3.list_objects(Bucket=bucket)["Contents"]] == [key]
    assert [entry["Key"] for entry in s3.list_object_versions(Bucket=bucket)["Versions"]] == [key]
    s3.delete_object(Bucket=bucket, Key=key)
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_a_key_of_1025_bytes_is_too_long(servers: Stack) -> None:
    for key in ("k" * 1025, "\u00e9" * 513):
        assert refused(servers.s3().put_object, Bucket="chunks", Key=key) == (400, "KeyTooLongError")


def test_content_headers_and_storage_class_come_back(servers: Stack) -> None:
    s3 = servers.s3()
    sent = {
        "ContentType": "text/plain; charset=utf-8",
        "CacheControl": "max-age=60",
        "ContentDisposition": 'attachment; filename="x"',
        "ContentEncoding": "gzip",
        "ContentLanguage": "de",
    }
    expires = "Wed, 21 Oct 2099 07:28:00 GMT"
    s3.put_object(Bucket="chunks", Key="headers", Body=b"x", StorageClass="STANDARD_IA", Expires=expires, **sent)
    for answer in (s3.get_object(Bucket="chunks", Key="headers"), s3.head_object(Bucket="chunks", Key="headers")):
        assert {name: answer[name] for name in sent} == sent
        assert answer["StorageClass"] == "STANDARD_IA"
        assert headers_of(answer)["expires"] == expires
        assert answer["AcceptRanges"] == "bytes"
    s3.put_object(Bucket="chunks", Key="plain", Body=b"x")
    plain = s3.head_object(Bucket="chunks", Key="plain")
    assert plain["ContentType"] == "binary/octet-stream"
    assert "StorageClass" not in plain
    reply = servers.request("PUT", "/chunks/headers", headers={"x-amz-storage-class": "NO_SUCH"})
    assert (reply.status, reply.code) == (400, "InvalidStorageClass")


def test_a_put_tells_what_a_head_will_tell(servers: Stack) -> None:
    s3, bucket = servers.s3(), fresh_bucket(servers)
    put = headers_of(s3.put_object(Bucket=bucket, Key="key", Body=b"data"))
    head = headers_of(s3.head_object(Bucket=bucket, Key="key"))
    assert (put["last-modified"], put["etag"]) == (head["last-modified"], head["etag"])


def test_user_metadata_comes_back_as_it_was_sent(servers: Stack) -> None:
    """Text beyond ASCII is answered as an encoded word (RFC 2047), as AWS does: many clients can read no raw UTF-8."""
    s3 = servers.s3()
    sent = {"empty": "", "word": "=?UTF-8?B?w6k=?=", "spaces": "a  b"}
    s3.put_object(Bucket="chunks", Key="metadata", Body=b"x", Metadata={**sent, "Mixed-CASE": "Value"})
    assert s3.head_object(Bucket="chunks", Key="metadata")["Metadata"] == {**sent, "mixed-case": "Value"}

    def raw(params: dict[str, dict[str, str]], **_: object) -> None:
        params["headers"]["x-amz-meta-raw"] = "\u00e9\u4e2d"

    client: BaseClient = s3_client(servers.url)
    client.meta.events.register("before-call.s3.PutObject", raw)
    client.put_object(Bucket="chunks", Key="metadata", Body=b"x")
    got = client.head_object(Bucket="chunks", Key="metadata")["Metadata"]["raw"]
    assert got == "=?UTF-8?B?w6nkuK0=?="
    ((word, charset),) = decode_header(got)
    assert (word.decode(), charset) == ("\u00e9\u4e2d", "utf-8")


def test_metadata_has_bounds(servers: Stack) -> None:
    s3 = servers.s3()
    s3.put_object(Bucket="chunks", Key="metadata", Metadata={"k": "v" * 2047})
    answer = refused(s3.put_object, Bucket="chunks", Key="metadata", Metadata={"k": "v" * 2048})
    assert answer == (400, "MetadataTooLarge")
    assert s3.head_object(Bucket="chunks", Key="metadata")["Metadata"] == {"k": "v" * 2047}


@pytest.mark.parametrize(
    ("header", "expected", "content_range"),
    [
        ("bytes=0-0", slice(0, 1), "bytes 0-0/1000"),
        ("bytes=990-", slice(990, None), "bytes 990-999/1000"),
        ("bytes=-10", slice(990, None), "bytes 990-999/1000"),
        ("bytes=-5000", slice(0, None), "bytes 0-999/1000"),
        ("bytes=5-5000", slice(5, None), "bytes 5-999/1000"),
        ("bytes=0-999", slice(0, None), "bytes 0-999/1000"),
        ("bytes=9-5", slice(0, None), None),
        ("bytes=0-1,3-4", slice(0, None), None),
        ("lines=0-1", slice(0, None), None),
        ("bytes=-", slice(0, None), None),
    ],
)
def test_ranges(servers: Stack, header: str, expected: slice, content_range: str | None) -> None:
    """What RFC 9110 calls no range is no range: the whole object, as S3 answers."""
    body = bytes(i % 251 for i in range(1000))
    s3 = servers.s3()
    s3.put_object(Bucket="chunks", Key="ranged", Body=body)
    got = s3.get_object(Bucket="chunks", Key="ranged", Range=header)
    assert got["Body"].read() == body[expected]
    assert (status_of(got), got.get("ContentRange")) == (206 if content_range else 200, content_range)
    head = s3.head_object(Bucket="chunks", Key="ranged", Range=header)
    assert (head["ContentLength"], headers_of(head).get("content-range")) == (len(body[expected]), content_range)


@pytest.mark.parametrize(("body", "header"), [(b"abc", "bytes=3-"), (b"abc", "bytes=-0"), (b"", "bytes=0-0")])
def test_a_range_outside_the_object_is_416_with_its_size(servers: Stack, body: bytes, header: str) -> None:
    servers.s3().put_object(Bucket="chunks", Key="short", Body=body)
    for method in ("GET", "HEAD"):
        reply = servers.request(method, "/chunks/short", headers={"range": header})
        assert (reply.status, reply.headers["content-range"]) == (416, f"bytes */{len(body)}")
        assert method == "HEAD" or reply.code == "InvalidRange"


def test_answers_can_be_given_other_headers(servers: Stack) -> None:
    """The response-* parameters, as presigned download links use them."""
    s3 = servers.s3()
    s3.put_object(Bucket="chunks", Key="override", Body=b"x", ContentType="a/b")
    wanted = {
        "ResponseContentType": "text/html",
        "ResponseContentDisposition": "attachment; filename=x",
        "ResponseCacheControl": "no-store",
        "ResponseContentLanguage": "fr",
        "ResponseContentEncoding": "identity",
    }
    for call in (s3.get_object, s3.head_object):
        got = call(Bucket="chunks", Key="override", **wanted)
        assert {name: got[name.removeprefix("Response")] for name in wanted} == wanted
    url = s3.generate_presigned_url(
        "get_object", Params={"Bucket": "chunks", "Key": "override", "ResponseContentType": "c/d"}
    )
    with urllib.request.urlopen(url) as answer:
        assert answer.headers["content-type"] == "c/d"
    injected = servers.request("GET", "/chunks/override?response-content-type=a%0D%0Ax-evil%3A1")
    assert (injected.status, injected.code) == (400, "InvalidArgument")
    assert s3.get_object(Bucket="chunks", Key="override")["ContentType"] == "a/b"


def test_part_one_of_an_object_stored_whole_is_the_object(servers: Stack) -> None:
    s3 = servers.s3()
    s3.put_object(Bucket="chunks", Key="whole", Body=b"abc")
    got = s3.get_object(Bucket="chunks", Key="whole", PartNumber=1)
    assert (got["Body"].read(), got["ContentRange"], got.get("PartsCount")) == (b"abc", "bytes 0-2/3", None)
    assert refused(s3.get_object, Bucket="chunks", Key="whole", PartNumber=2) == (416, "InvalidPartNumber")
    assert refused(s3.get_object, Bucket="chunks", Key="whole", PartNumber=0) == (400, "InvalidArgument")
    both = {"PartNumber": 1, "Range": "bytes=0-1"}
    assert refused(s3.get_object, Bucket="chunks", Key="whole", **both) == (400, "InvalidRequest")


def test_the_one_version_is_called_null(servers: Stack) -> None:
    """Clean-up tools name it even where versions were never switched on."""
    s3 = servers.s3()
    s3.put_object(Bucket="chunks", Key="versioned", Body=b"x")
    for call in (s3.get_object, s3.head_object, s3.get_object_tagging, s3.get_object_acl):
        call(Bucket="chunks", Key="versioned", VersionId="null")
        assert refused(call, Bucket="chunks", Key="versioned", VersionId="3HL4kq")[0] == 404
    assert refused(s3.delete_object, Bucket="chunks", Key="versioned", VersionId="3HL4kq") == (404, "NoSuchVersion")
    assert servers.request("GET", "/chunks/versioned?versionId=").code == "InvalidArgument"
    assert servers.request("PUT", "/chunks/versioned?versionId=null").code == "InvalidArgument"
    assert status_of(s3.delete_object(Bucket="chunks", Key="versioned", VersionId="null")) == 204
    assert refused(s3.head_object, Bucket="chunks", Key="versioned")[0] == 404


def test_many_keys_are_deleted_in_one_request(servers: Stack) -> None:
    s3, bucket = servers.s3(), fresh_bucket(servers)
    keys = ["a", "b/c", "sp ace", "\u00e9", "<&>", "new\nline\r"]
    for key in keys:
        s3.put_object(Bucket=bucket, Key=key, Body=b"x")
    names = [{"Key": key, "VersionId": "null"} for key in keys[:3]] + [{"Key": key} for key in [*keys[3:], "absent"]]
    names.append({"Key": "a", "VersionId": "other"})
    answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": names}, BypassGovernanceRetention=True)
    assert [(d["Key"], d.get("VersionId")) for d in answer["Deleted"]] == [
        (name["Key"], name.get("VersionId")) for name in names[:-1]
    ]
    assert [(e["Key"], e["VersionId"], e["Code"]) for e in answer["Errors"]] == [("a", "other", "NoSuchVersion")]
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_a_quiet_delete_says_only_what_failed(servers: Stack) -> None:
    s3, bucket = servers.s3(), fresh_bucket(servers)
    etag = s3.put_object(Bucket=bucket, Key="kept", Body=b"x")["ETag"]
    names = [{"Key": "kept", "ETag": '"0"'}, {"Key": "absent"}, {"Key": "k" * 1025}]
    answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": names, "Quiet": True})
    assert "Deleted" not in answer
    assert {error["Code"] for error in answer["Errors"]} == {"PreconditionFailed", "KeyTooLongError"}
    answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "kept", "ETag": etag}]})
    assert [entry["Key"] for entry in answer["Deleted"]] == ["kept"]


def test_a_delete_request_is_checked(servers: Stack) -> None:
    def post(body: bytes, **headers: str) -> tuple[int, str | None]:
        digest = {} if headers else {"content-md5": base64.b64encode(hashlib.md5(body).digest()).decode()}
        reply = servers.request("POST", "/chunks?delete", body=body, headers=headers | digest)
        return reply.status, reply.code

    one = b"<Delete><Object><Key>never-there</Key></Object></Delete>"
    many = b"<Delete>" + b"<Object><Key>never-there</Key></Object>" * 1001 + b"</Delete>"
    assert post(one) == (200, None)
    for body in (b"", b"<Delete/>", b"<Delete>", b"<Other/>", many, b"<Delete><Object/></Delete>", one + b"x"):
        assert post(body) == (400, "MalformedXML")
    assert post(one, **{"content-md5": "1B2M2Y8AsgTpgAmY7PhCfg=="}) == (400, "BadDigest")
    assert post(one, **{"x-amz-checksum-crc32": "AAAAAA=="}) == (400, "BadDigest")
    assert post(one, **{"x-amz-meta-no": "digest"}) == (400, "InvalidRequest")
    bomb = b'<!DOCTYPE d [<!ENTITY a "b">]><Delete><Object><Key>&a;</Key></Object></Delete>'
    assert post(bomb) == (400, "MalformedXML")


def test_an_object_belongs_to_its_buckets_owner_alone(servers: Stack) -> None:
    s3 = servers.s3()
    s3.put_object(Bucket="chunks", Key="acl", Body=b"x", ACL="private")
    s3.put_object(Bucket="chunks", Key="acl", Body=b"x", ACL="bucket-owner-full-control")
    acl = s3.get_object_acl(Bucket="chunks", Key="acl")
    assert [(grant["Grantee"]["ID"], grant["Permission"]) for grant in acl["Grants"]] == [(OWNER[0], "FULL_CONTROL")]
    s3.put_object_acl(Bucket="chunks", Key="acl", ACL="private")
    assert refused(s3.put_object_acl, Bucket="chunks", Key="acl", ACL="public-read") == (501, "NotImplemented")
    assert refused(s3.get_object_acl, Bucket="chunks", Key="no-acl") == (404, "NoSuchKey")
    assert refused(s3.put_object_acl, Bucket="chunks", Key="no-acl", ACL="private") == (404, "NoSuchKey")


@pytest.mark.parametrize(
    "headers",
    [
        {"x-amz-acl": "public-read"},
        {"x-amz-grant-read": "id=x"},
        {"x-amz-server-side-encryption": "AES256"},
        {"x-amz-server-side-encryption-customer-algorithm": "AES256"},
        {"x-amz-website-redirect-location": "/x"},
        {"x-amz-object-lock-mode": "GOVERNANCE"},
        {"x-amz-object-lock-legal-hold": "ON"},
        {"x-amz-write-offset-bytes": "0"},
        {"x-amz-rdma-token": "opaque"},
    ],
    ids=lambda headers: next(iter(headers)),
)
def test_what_objects_cannot_have_is_refused_and_nothing_made(servers: Stack, headers: dict[str, str]) -> None:
    """Whatever makes an object: a put, a copy, an upload."""
    servers.s3().put_object(Bucket="chunks", Key="copied", Body=b"x")
    copy = {**headers, "x-amz-copy-source": "chunks/copied"}
    for method, target, sent in [
        ("PUT", "/chunks/refused", headers),
        ("PUT", "/chunks/refused", copy),
        ("POST", "/chunks/refused?uploads", headers),
    ]:
        reply = servers.request(method, target, headers=sent)
        assert (reply.status, reply.code) == (501, "NotImplemented")
    assert servers.request("HEAD", "/chunks/refused").status == 404


def test_what_can_be_asked_of_objects_elsewhere_is_not_implemented(servers: Stack) -> None:
    servers.s3().put_object(Bucket="chunks", Key="asked", Body=b"x")
    for method, subresource in [
        ("GET", "torrent"),
        ("GET", "retention"),
        ("GET", "legal-hold"),
        ("PUT", "retention"),
        ("POST", "restore"),
        ("POST", "select"),
        ("PUT", "renameObject"),
        ("POST", "tagging"),
    ]:
        reply = servers.request(method, f"/chunks/asked?{subresource}")
        assert (reply.status, reply.code) == (501, "NotImplemented"), subresource
    assert servers.request("POST", "/chunks/asked").code == "NotImplemented"
    sse_c = {"x-amz-server-side-encryption-customer-algorithm": "AES256"}
    assert servers.request("GET", "/chunks/asked", headers=sse_c).code == "NotImplemented"


def test_a_large_object_survives_an_overwrite_while_it_is_read(servers: Stack) -> None:
    s3, body = servers.s3(), os.urandom(8_000_000)
    put = s3.put_object(Bucket="chunks", Key="large", Body=body)
    assert put["ETag"] == f'"{hashlib.md5(body).hexdigest()}"'
    got = s3.get_object(Bucket="chunks", Key="large")["Body"]
    start = got.read(1000)
    s3.put_object(Bucket="chunks", Key="large", Body=b"new")
    assert start + got.read() == body
    assert s3.get_object(Bucket="chunks", Key="large")["Body"].read() == b"new"
