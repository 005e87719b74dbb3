"""Browser uploads by HTML form (POST policy): boto3 signs the policy and reads the object, urllib3 writes the form."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from urllib3 import encode_multipart_formdata

from descriptors.objects import ChecksumAlgorithm
from gateway import form_upload
from gateway.s3.form import HEAD_BYTES_MAX
from gateway.s3.sigv4 import signing_key
from gateway.s3.upload import checksum_of
from tests.support.requests import OWNER, READER, s3_client
from tests.support.s3_calls import fresh_bucket
from tests.support.servers import Stack
from tests.support.small_gateway import KEY, Answer, SmallGateway, head_of, sent, small_gateway
from tests.support.waiting import eventually

DATA = bytes(range(256)) * 100
Fields = list[tuple[str, Any]]
FILE = ("file", ("C:\\fakepath\\caf\u00e9.bin", DATA, "image/png"))


def posted(url: str, bucket: str, fields: Fields, **headers: str) -> Answer:
    """The answer to a form with these fields, in this order."""
    body, content_type = encode_multipart_formdata(fields)
    return posted_body(url, bucket, body, content_type, **headers)


def posted_body(url: str, bucket: str, body: bytes, content_type: str, **headers: str) -> Answer:
    head = {"Host": "h", "Content-Type": content_type, "Content-Length": str(len(body)), **headers}
    return sent(url, head_of("POST", f"/{bucket}", head), body)


def in_one_hour() -> str:
    return (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def signed(document: object, key: tuple[str, str] = OWNER, **changes: str) -> Fields:
    """The fields that sign a policy document."""
    date = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{date[:8]}/us-east-1/s3/aws4_request"
    policy = base64.b64encode(json.dumps(document).encode()).decode()
    fields = {
        "policy": policy,
        "x-amz-algorithm": "AWS4-HMAC-SHA256",
        "x-amz-credential": f"{key[0]}/{scope}",
        "x-amz-date": date,
        "x-amz-signature": hmac.digest(signing_key(key[1], scope), policy.encode(), hashlib.sha256).hex(),
    }
    return list((fields | changes).items())


def policy_of(bucket: str, *conditions: object, **document: object) -> dict[str, object]:
    """A policy for the key `k` and these conditions."""
    signing = [["starts-with", f"$x-amz-{name}", ""] for name in ("algorithm", "credential", "date")]
    return {
        "expiration": in_one_hour(),
        "conditions": [{"bucket": bucket}, {"key": "k"}, *signing, *conditions],
    } | document


@pytest.mark.parametrize("version", [None, "s3v4"])
def test_a_form_that_boto3_has_signed_uploads_a_file(servers: Stack, version: str | None) -> None:
    """With metadata, tags and a checksum, the file's own name, and a submit button behind it. Unless it is told
    otherwise, boto3 signs forms with Version 2.
    """
    signer = s3_client(servers.url, signature_version=version)
    s3, bucket = servers.s3(), fresh_bucket(servers)
    checksum = checksum_of(ChecksumAlgorithm.SHA256, DATA)
    kept = {
        "Content-Type": "image/png",
        "x-amz-meta-who": "caf\u00e9",
        "x-amz-checksum-sha256": checksum,
        "tagging": "<Tagging><TagSet><Tag><Key>a</Key><Value>1</Value></Tag></TagSet></Tagging>",
        "success_action_status": "201",
        "acl": "private",
    }
    form = signer.generate_presigned_post(
        bucket, "up/${filename}", kept, [{name: value} for name, value in kept.items()]
    )
    answer = posted(servers.url, bucket, [*form["fields"].items(), FILE, ("submit", "Upload")])
    assert answer.status == 201, answer.body
    assert f"<Bucket>{bucket}</Bucket><Key>up/caf\u00e9.bin</Key>" in answer.body.decode()
    assert answer.headers["location"].endswith(f"/{bucket}/up/caf%C3%A9.bin")
    got = s3.get_object(Bucket=bucket, Key="up/caf\u00e9.bin", ChecksumMode="ENABLED")
    assert got["Body"].read() == DATA
    assert (got["ETag"], got["ContentType"]) == (answer.headers["etag"], "image/png")
    assert (got["TagCount"], got["ChecksumSHA256"]) == (1, checksum)
    assert got["Metadata"]["who"] == "=?UTF-8?B?Y2Fmw6k=?="


def test_a_form_is_answered_as_it_asks(servers: Stack) -> None:
    bucket = fresh_bucket(servers)

    def answered(name: str, value: str) -> Answer:
        form = signed(policy_of(bucket, ["starts-with", f"${name}", ""]))
        return posted(servers.url, bucket, [("key", "k"), (name, value), *form, FILE])

    assert [answered("success_action_status", text).status for text in ("200", "201", "204", "404")] == [
        200, 201, 204, 204,
    ]  # fmt: skip
    answer = answered("success_action_redirect", "http://127.0.0.1/done?a=1")
    assert answer.status == 303
    target = urlsplit(answer.headers["location"])
    assert (target.netloc, target.path) == ("127.0.0.1", "/done")
    assert parse_qs(target.query) == {"a": ["1"], "bucket": [bucket], "key": ["k"], "etag": [answer.headers["etag"]]}
    for bad in ("javascript:alert(1)", "//elsewhere", "http://h/\r\nSet-Cookie: a=b", "http://[", "/relative"):
        answer = answered("success_action_redirect", bad)
        assert (answer.status, "set-cookie" in answer.headers) == (204, False), bad


def refusals(bucket: str) -> dict[str, tuple[Fields, int, str]]:
    """Forms with one thing wrong, and what they are answered."""
    good = signed(policy_of(bucket))
    key = ("key", "k")

    def but(name: str, value: str | None) -> Fields:
        return [each if each[0] != name else (name, value) for each in good if each[0] != name or value is not None]

    def with_policy(*conditions: object, **document: object) -> Fields:
        return [key, *signed(policy_of(bucket, *conditions, **document)), FILE]

    def any_value(name: str) -> Fields:
        return signed(policy_of(bucket, ["starts-with", f"${name}", ""]))

    past = "2020-01-01T00:00:00Z"
    return {
        "nothing signed": ([key, FILE], 403, "AccessDenied"),
        "no signature": ([key, *but("x-amz-signature", None), FILE], 400, "InvalidArgument"),
        "wrong signature": ([key, *but("x-amz-signature", "0" * 64), FILE], 403, "SignatureDoesNotMatch"),
        "another policy": ([key, *but("policy", "e30="), FILE], 403, "SignatureDoesNotMatch"),
        "unknown key": ([key, *signed(policy_of(bucket), ("NOBODY", "x")), FILE], 403, "InvalidAccessKeyId"),
        "reader": ([key, *signed(policy_of(bucket), READER), FILE], 403, "AccessDenied"),
        "version 2, unknown key": (
            [key, ("AWSAccessKeyId", "a"), ("signature", "b"), ("policy", "e30="), FILE],
            403, "InvalidAccessKeyId",
        ),
        "version 2, wrong signature": (
            [key, ("AWSAccessKeyId", OWNER[0]), ("signature", "b"), ("policy", "e30="), FILE],
            403, "SignatureDoesNotMatch",
        ),
        "version 2, no signature": ([key, ("AWSAccessKeyId", "a"), ("policy", "e30="), FILE], 400, "InvalidArgument"),
        "other region": (
            [key, *but("x-amz-credential", good[2][1].replace("us-east-1", "eu-west-1")), FILE],
            400, "AuthorizationQueryParametersError",
        ),
        "expired": (with_policy(expiration=past), 403, "AccessDenied"),
        "other key": ([("key", "other"), *good, FILE], 403, "AccessDenied"),
        "no key": ([*good, FILE], 400, "InvalidArgument"),
        "key behind the file": ([*good, FILE, key], 400, "InvalidArgument"),
        "field without a condition": ([key, ("x-amz-meta-a", "b"), *good, FILE], 403, "AccessDenied"),
        "condition without a field": (with_policy(["eq", "$x-amz-meta-a", "b"]), 403, "AccessDenied"),
        "other bucket": ([key, *signed(policy_of("elsewhere")), FILE], 403, "AccessDenied"),
        "no bucket": (
            [key, *signed({"expiration": in_one_hour(), "conditions": policy_of(bucket)["conditions"][1:]}), FILE],  # type: ignore[index]
            403, "AccessDenied",
        ),
        "too large": (with_policy(["content-length-range", 0, len(DATA) - 1]), 400, "EntityTooLarge"),
        "too small": (with_policy(["content-length-range", len(DATA) + 1, 1 << 40]), 400, "EntityTooSmall"),
        "no file": ([key, *good], 400, "IncorrectNumberOfFilesInPostRequest"),
        "twice": ([key, key, *good, FILE], 400, "InvalidArgument"),
        "too many fields": (
            [("x-ignore-a", "a" * HEAD_BYTES_MAX), key, *good, FILE],
            400, "MaxPostPreDataLengthExceededError",
        ),
        "public": (
            [key, ("acl", "public-read"), *signed(policy_of(bucket, {"acl": "public-read"})), FILE],
            501, "NotImplemented",
        ),
        "wrong checksum": (
            [key, ("x-amz-checksum-crc32", "AAAAAA=="), *any_value("x-amz-checksum-crc32"), FILE],
            400, "BadDigest",
        ),
        "header with a line": (
            [key, ("x-amz-meta-a", "b\r\nc: d"), *any_value("x-amz-meta-a"), FILE],
            400, "InvalidArgument",
        ),
        "not JSON": ([key, *signed("x"), FILE], 400, "InvalidPolicyDocument"),
        "no expiration": (with_policy(expiration=None), 400, "InvalidPolicyDocument"),
        "no conditions": (with_policy(conditions=[]), 400, "InvalidPolicyDocument"),
        "one bound": (with_policy(["content-length-range", 0]), 400, "InvalidPolicyDocument"),
        "negative bound": (with_policy(["content-length-range", -1, 0]), 400, "InvalidPolicyDocument"),
        "unknown operator": (with_policy(["ends-with", "$key", ""]), 400, "InvalidPolicyDocument"),
    }  # fmt: skip


def test_a_form_with_anything_wrong_stores_nothing(servers: Stack) -> None:
    s3, bucket = servers.s3(), fresh_bucket(servers)
    for name, (fields, status, code) in refusals(bucket).items():
        answer = posted(servers.url, bucket, fields)
        assert (answer.status, answer.code) == (status, code), (name, answer.body)
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
    assert posted(servers.url, bucket, [("key", "k"), *signed(policy_of(bucket)), FILE]).status == 204


def test_forms_with_version_2_are_valid_for_a_week_at_most_and_can_be_turned_off(servers: Stack) -> None:
    """The policy of a Version 4 form has the date of its signature, which bounds it as well."""
    s3, bucket = s3_client(servers.url), fresh_bucket(servers)

    def fields(expires_s: int) -> Fields:
        return [*s3.generate_presigned_post(bucket, "k", ExpiresIn=expires_s)["fields"].items(), FILE]

    assert posted(servers.url, bucket, fields(7 * 86_400 + 60)).code == "AccessDenied"
    assert posted(servers.url, bucket, fields(60)).status == 204
    with small_gateway(allows_sigv2=False) as gateway:
        assert posted(gateway.url, bucket, fields(60)).code == "InvalidArgument"


def test_names_of_fields_and_conditions_have_any_case_and_some_are_ignored(servers: Stack) -> None:
    bucket = fresh_bucket(servers)
    policy = policy_of(bucket, ["StArTs-WiTh", "$cOnTeNt-TyPe", "image/"])
    fields: Fields = [("kEy", "k"), ("CONTENT-type", "image/png,image/gif"), ("X-Ignore-a", "b")]
    signing = [(name.upper(), value) for name, value in signed(policy)]
    assert posted(servers.url, bucket, [*fields, *signing, FILE]).status == 204
    mixed = [("key", "k"), ("content-type", "image/png,text/html"), *signed(policy), FILE]
    assert posted(servers.url, bucket, mixed).code == "AccessDenied"


def test_a_body_that_is_no_form_is_refused_by_name(servers: Stack) -> None:
    bucket = fresh_bucket(servers)
    file = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n\r\n--x--\r\n'
    for body, content_type in (
        (b"", "multipart/form-data"),
        (b"x", f"multipart/form-data; boundary={'a' * 300}"),
        (b"garbage", "multipart/form-data; boundary=x"),
        (b"--x\r\n\r\nno disposition\r\n" + file, "multipart/form-data; boundary=x"),
        (b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xff\r\n' + file, "multipart/form-data; boundary=x"),
    ):
        answer = posted_body(servers.url, bucket, body, content_type)
        assert (answer.status, answer.code) == (400, "MalformedPOSTRequest"), body
    chunked = head_of(
        "POST",
        f"/{bucket}",
        {"Host": "h", "Content-Type": "multipart/form-data; boundary=x", "Transfer-Encoding": "chunked"},
    )
    assert sent(servers.url, chunked, b"0\r\n\r\n").code == "MissingContentLength"
    for query in ("?layerwise", "?lookup", "?delete", "?acl"):
        form = [("key", "k"), *signed(policy_of(bucket)), FILE]
        assert posted(servers.url, bucket + query, form).code == "AccessDenied", query


def test_what_is_cut_off_stores_nothing(servers: Stack) -> None:
    """Both in the body, whose length is right, and by a client that goes away."""
    s3, bucket = servers.s3(), fresh_bucket(servers)
    body, content_type = encode_multipart_formdata([("key", "k"), *signed(policy_of(bucket)), FILE])
    assert posted_body(servers.url, bucket, body[:-100], content_type).code == "MalformedPOSTRequest"
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A gateway that holds files of up to 100,000 bytes."""
    monkeypatch.setattr(form_upload, "HELD_BYTES_MAX", 100_000)
    with small_gateway() as running:
        yield running


def test_a_large_file_streams_and_is_the_last_field(gateway: SmallGateway) -> None:
    """Its length follows from the length of the form, so nothing may follow the file."""
    large, form = DATA * 40, [("key", "k"), *signed(policy_of("b"), KEY)]
    file = ("file", ("a", large, "x/y"))
    assert posted(gateway.url, "b", [*form, file]).status == 204
    assert gateway.storage.stored.pop(("b", "k")) == large
    for fields in ([*form, file, ("submit", "Upload")], [*form, file, file]):
        answer = posted(gateway.url, "b", fields)
        assert (answer.status, answer.code) == (400, "InvalidArgument")
        assert b"the file must be the last field" in answer.body
    body, content_type = encode_multipart_formdata([*form, file])
    for change in (body[:-2], body + b"\r\n", body[:-60]):
        assert posted_body(gateway.url, "b", change, content_type).status == 400
    assert gateway.storage.stored == {}
    exactly = [*form[:1], *signed(policy_of("b", ["content-length-range", len(large), len(large)]), KEY), file]
    assert posted(gateway.url, "b", exactly).status == 204


def test_held_files_have_a_memory_of_their_own(gateway: SmallGateway) -> None:
    """Whoever has a form must not keep its signer's descriptors and lookups from memory."""
    form = [("key", "k"), *signed(policy_of("b"), KEY), FILE]
    assert gateway.documents.held_bytes == 0
    forms = gateway.held_forms
    forms.take(KEY[0], 32 << 20)
    assert posted(gateway.url, "b", form).code == "SlowDown"
    forms.give_back(KEY[0], 32 << 20)
    assert posted(gateway.url, "b", form).status == 204
    assert forms.held_bytes == 0
    large = ("file", ("a", DATA * 3, "x/y"))
    bounded = [("key", "k"), *signed(policy_of("b", ["content-length-range", 0, 10]), KEY), large]
    assert posted(gateway.url, "b", bounded).code == "EntityTooLarge"


def test_forms_of_strangers_give_their_places_up() -> None:
    """60 connections that each began a form without a signature kept everybody else out."""
    with small_gateway(connections_max=4) as gateway:
        head = {"Host": "h", "Content-Type": "multipart/form-data; boundary=x", "Content-Length": "1000000"}
        begun = [gateway.connect() for _ in range(4)]
        for sock in begun:
            sock.sendall(head_of("POST", "/b", head) + b"--x\r\n")
        assert eventually(lambda: len(gateway.server.idle) == 4)
        form = [("key", "k"), *signed(policy_of("b"), KEY), FILE]
        assert posted(gateway.url, "b", form).status == 204
        for sock in begun:
            sock.close()
