"""Signature Version 4: the published examples, and every way a claim can be wrong."""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import quote

import pytest
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from descriptors.errors import CallerError, ErrorCode
from gateway.s3.credentials import Credential, CredentialBook, authorize
from gateway.s3.payload_form import PayloadForm
from gateway.s3.request import S3Request, check_bucket_name, parse_range, parse_target
from gateway.s3.sigv4 import read_claim, signing_key, verify

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
NOW = datetime(2013, 5, 24, tzinfo=UTC).timestamp()
SCOPE = "AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request"


def get_example(**changes: str) -> S3Request:
    """The GET example of the S3 API reference, "Signature Calculations for the Authorization Header"."""
    headers = {
        "host": "examplebucket.s3.amazonaws.com",
        "range": "bytes=0-9",
        "x-amz-content-sha256": EMPTY,
        "x-amz-date": "20130524T000000Z",
        "authorization": (
            f"AWS4-HMAC-SHA256 Credential={SCOPE},SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"
            "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
        ),
    }
    headers.update({name.replace("_", "-"): value for name, value in changes.items()})
    return parse_target("GET", "/test.txt", headers)


def presigned_example(expires: str = "86400") -> S3Request:
    """The presigned example of the same reference, "Using Query Parameters"."""
    query = (
        "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2F"
        f"aws4_request&X-Amz-Date=20130524T000000Z&X-Amz-Expires={expires}&X-Amz-SignedHeaders=host"
        "&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    )
    return parse_target("GET", f"/test.txt?{query}", {"host": "examplebucket.s3.amazonaws.com"})


def check(request: S3Request, secret: str = SECRET, region: str = "us-east-1", now: float = NOW) -> None:
    verify(request, read_claim(request), secret, region, now)


def refused(request: S3Request, **options: object) -> ErrorCode:
    with pytest.raises(CallerError) as error:
        check(request, **options)  # type: ignore[arg-type]
    return error.value.code


def test_published_header_example_verifies() -> None:
    check(get_example())


def test_published_list_example_verifies() -> None:
    """Get Bucket (List Objects) with max-keys=2&prefix=J: query parameters in the canonical request."""
    signature = "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    authorization = (
        f"AWS4-HMAC-SHA256 Credential={SCOPE},SignedHeaders=host;x-amz-content-sha256;x-amz-date,Signature={signature}"
    )
    headers = {
        "host": "examplebucket.s3.amazonaws.com",
        "x-amz-content-sha256": EMPTY,
        "x-amz-date": "20130524T000000Z",
        "authorization": authorization,
    }
    check(parse_target("GET", "/?max-keys=2&prefix=J", headers))


def test_published_presigned_example_verifies_until_it_expires() -> None:
    check(presigned_example())
    check(presigned_example(), now=NOW + 86_399)
    assert refused(presigned_example(), now=NOW + 86_401) is ErrorCode.ACCESS_DENIED
    assert refused(presigned_example(), now=NOW - 3600) is ErrorCode.ACCESS_DENIED
    assert refused(presigned_example("86401")) is ErrorCode.SIGNATURE_DOES_NOT_MATCH
    assert refused(presigned_example("604801")) is ErrorCode.AUTHORIZATION_QUERY_ERROR


def test_anything_changed_after_signing_is_refused() -> None:
    assert refused(get_example(range="bytes=0-8")) is ErrorCode.SIGNATURE_DOES_NOT_MATCH
    assert refused(get_example(), secret="another") is ErrorCode.SIGNATURE_DOES_NOT_MATCH
    other_path = parse_target("GET", "/test.txT", get_example().headers)
    assert refused(other_path) is ErrorCode.SIGNATURE_DOES_NOT_MATCH
    other_query = parse_target("GET", "/test.txt?acl", get_example().headers)
    assert refused(other_query) is ErrorCode.SIGNATURE_DOES_NOT_MATCH


def test_fifteen_minutes_of_skew_are_the_limit() -> None:
    check(get_example(), now=NOW + 900)
    check(get_example(), now=NOW - 900)
    assert refused(get_example(), now=NOW + 901) is ErrorCode.REQUEST_TIME_TOO_SKEWED
    assert refused(get_example(), now=NOW - 901) is ErrorCode.REQUEST_TIME_TOO_SKEWED


def test_amz_headers_must_be_signed() -> None:
    """An attacker must not add x-amz- headers to a signed request."""
    assert refused(get_example(x_amz_meta_a="b")) is ErrorCode.ACCESS_DENIED


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        ("AWS AKIA:abc", ErrorCode.INVALID_REQUEST),
        ("Bearer abc", ErrorCode.INVALID_REQUEST),
        ("AWS4-HMAC-SHA256 nonsense", ErrorCode.AUTHORIZATION_HEADER_MALFORMED),
        ("AWS4-HMAC-SHA256 Credential=a,SignedHeaders=host", ErrorCode.AUTHORIZATION_HEADER_MALFORMED),
        (
            "AWS4-HMAC-SHA256 Credential=k/20130524/us-east-1/s3,SignedHeaders=host,Signature=0",
            ErrorCode.AUTHORIZATION_HEADER_MALFORMED,
        ),
        (
            f"AWS4-HMAC-SHA256 Credential={SCOPE},SignedHeaders=x;host,Signature=0",
            ErrorCode.AUTHORIZATION_HEADER_MALFORMED,
        ),
        (
            f"AWS4-HMAC-SHA256 Credential={SCOPE.replace('20130524', '20130523')},SignedHeaders=host,Signature=0",
            ErrorCode.AUTHORIZATION_HEADER_MALFORMED,
        ),
        (
            f"AWS4-HMAC-SHA256 Credential={SCOPE.replace('s3', 'ec2')},SignedHeaders=host,Signature=0",
            ErrorCode.AUTHORIZATION_HEADER_MALFORMED,
        ),
    ],
)
def test_malformed_and_foreign_claims_are_named(authorization: str, code: ErrorCode) -> None:
    assert refused(get_example(authorization=authorization)) is code


def test_unsigned_and_version_2_requests_are_refused_clearly() -> None:
    assert refused(parse_target("GET", "/", {"host": "h"})) is ErrorCode.ACCESS_DENIED
    query = "/b?AWSAccessKeyId=k&Signature=s&Expires=1"
    with pytest.raises(CallerError, match=r"not supported. Please use AWS4-HMAC-SHA256") as refusal:
        check(parse_target("GET", query, {"host": "h"}))
    assert refusal.value.code is ErrorCode.INVALID_REQUEST


def test_payload_hash_must_be_a_digest_or_a_form_s3_knows() -> None:
    for wrong in ("abc", "STREAMING-UNSIGNED-PAYLOAD", "e" * 63, "g" * 64):
        assert refused(get_example(x_amz_content_sha256=wrong)) is ErrorCode.INVALID_ARGUMENT
    for form in PayloadForm:
        if form is not PayloadForm.SIGNED:
            assert read_claim(get_example(x_amz_content_sha256=form.value)).form is form
    assert read_claim(get_example()).body_sha256 == EMPTY
    assert read_claim(get_example(x_amz_content_sha256=EMPTY.upper())).body_sha256 == EMPTY


def test_asymmetric_signatures_are_not_implemented() -> None:
    for suffix in ("PAYLOAD", "PAYLOAD-TRAILER"):
        chunks = f"STREAMING-AWS4-ECDSA-P256-SHA256-{suffix}"
        assert refused(get_example(x_amz_content_sha256=chunks)) is ErrorCode.NOT_IMPLEMENTED
    header = get_example(authorization="AWS4-ECDSA-P256-SHA256 Credential=a,SignedHeaders=host,Signature=0")
    assert refused(header) is ErrorCode.NOT_IMPLEMENTED
    query = "/k?X-Amz-Algorithm=AWS4-ECDSA-P256-SHA256&X-Amz-Signature=0"
    assert refused(parse_target("GET", query, {"host": "h"})) is ErrorCode.NOT_IMPLEMENTED


def test_a_presigned_url_and_its_header_must_agree_on_the_payload() -> None:
    """Else a body could be stored in the coding it travelled in."""
    example = presigned_example()
    query = (*example.query, ("X-Amz-Content-Sha256", "UNSIGNED-PAYLOAD"))
    headers = {**example.headers, "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER"}
    assert refused(replace(example, query=query, headers=headers)) is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("key", ["a b+c", "x//y/../z/.", "=,:;@&$!'()*", "caf\u00e9/\u4e16", "nul\0", "%25 twice"])
@pytest.mark.parametrize("presigned", [False, True])
def test_what_botocore_signs_verifies(key: str, presigned: bool) -> None:
    """Another implementation of the same signature, over keys with every kind of character."""
    url = f"https://kvc.example.com/{quote(key, safe='/~')}?x-id=GetObject&prefix={quote(key, safe='')}&uploads"
    aws = AWSRequest(method="GET", url=url, headers={"x-amz-meta-a": "  two   spaces "})
    signer = S3SigV4QueryAuth if presigned else S3SigV4Auth
    signer(Credentials("AKIAIOSFODNN7EXAMPLE", SECRET), "s3", "us-east-1").add_auth(aws)
    headers = {name.lower(): value for name, value in aws.headers.items()} | {"host": "kvc.example.com"}
    request = parse_target("GET", aws.url.removeprefix("https://kvc.example.com"), headers, ("example.com",))
    assert (request.bucket, request.key) == ("kvc", key)
    check(request, now=time.time())


def test_a_path_signed_as_it_was_sent_verifies() -> None:
    """curl signs the path it sends, encoded or not; what is verified is still the path that came."""
    headers = {
        "host": "h",
        "x-amz-content-sha256": EMPTY,
        "x-amz-date": "20130524T000000Z",
    }
    names = ";".join(headers)
    canonical = "\n".join(
        ("GET", "/b/a(1)=%7E", "", *(f"{name}:{value}" for name, value in headers.items()), "", names, EMPTY)
    )
    scope = SCOPE.partition("/")[2]
    text = "\n".join(("AWS4-HMAC-SHA256", "20130524T000000Z", scope, hashlib.sha256(canonical.encode()).hexdigest()))
    signature = hmac.new(signing_key(SECRET, scope), text.encode(), hashlib.sha256).hexdigest()
    headers["authorization"] = f"AWS4-HMAC-SHA256 Credential={SCOPE},SignedHeaders={names},Signature={signature}"
    check(parse_target("GET", "/b/a(1)=%7E", headers))
    assert refused(parse_target("GET", "/b/a(1)=~", headers)) is ErrorCode.SIGNATURE_DOES_NOT_MATCH


def test_keys_may_do_what_their_patterns_allow() -> None:
    reader = Credential("k", "secret", buckets=("kv-*",), actions=("GetObject", "List*"))
    authorize(reader, "GetObject", "kv-a")
    authorize(reader, "ListAllMyBuckets", "")
    for action, bucket in [("PutObject", "kv-a"), ("GetObject", "other")]:
        with pytest.raises(CallerError, match="AccessDenied"):
            authorize(reader, action, bucket)
    assert "secret" not in repr(reader)
    with pytest.raises(CallerError, match="InvalidAccessKeyId"):
        CredentialBook([reader]).find("nobody")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-9", (0, 9, None)),
        ("bytes=5-", (5, None, None)),
        ("bytes=-3", (None, None, 3)),
        ("bytes=-", None),
        ("bytes=9-5", None),
        ("bytes=0-1,3-4", None),
        ("lines=0-1", None),
        (None, None),
    ],
)
def test_ranges_not_understood_are_ignored(header: str | None, expected: tuple[object, ...] | None) -> None:
    """RFC 9110, 14.2: a Range that is not valid is as if it were absent."""
    spec = parse_range(header)
    assert expected == (None if spec is None else (spec.first, spec.last, spec.suffix))


@pytest.mark.parametrize("name", ["ab", "A" * 5, "a_b", "-ab", "ab-", "a..b", "192.168.0.1", "xn--a", "a" * 64, "a.-b"])
def test_bucket_names_follow_the_rules_of_s3(name: str) -> None:
    check_bucket_name("kv-cache.v1")
    with pytest.raises(CallerError, match="InvalidBucketName"):
        check_bucket_name(name)


def test_keys_keep_every_byte_the_client_sent() -> None:
    request = parse_target("GET", "/kvc/a%2Fb//c/../d%20e+%C3%A9?prefix=%2B+", {})
    assert request.key == "a/b//c/../d e+\u00e9"
    assert request.query == (("prefix", "++"),)
    with pytest.raises(CallerError, match="InvalidURI"):
        parse_target("GET", "/kvc/%ff", {})
