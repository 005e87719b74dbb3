"""Signature Version 4: the published examples, and every way a claim can be wrong."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from descriptors.errors import CallerError, ErrorCode
from gateway.credentials import Credential, CredentialBook, authorize
from gateway.request import S3Request, check_bucket_name, parse_range, parse_target
from gateway.routing import Operation, route
from gateway.sigv4 import read_claim, verify

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
    assert refused(presigned_example(), now=NOW + 86_401) is ErrorCode.REQUEST_EXPIRED
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
    assert refused(parse_target("GET", query, {"host": "h"})) is ErrorCode.INVALID_REQUEST


def test_payload_hash_must_be_a_digest_or_unsigned() -> None:
    assert refused(get_example(x_amz_content_sha256="abc")) is ErrorCode.INVALID_ARGUMENT
    streaming = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
    assert refused(get_example(x_amz_content_sha256=streaming)) is ErrorCode.NOT_IMPLEMENTED


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


@pytest.mark.parametrize(
    ("method", "target", "operation"),
    [
        ("GET", "/", Operation.LIST_BUCKETS),
        ("PUT", "/kvc", Operation.CREATE_BUCKET),
        ("HEAD", "/kvc/", Operation.HEAD_BUCKET),
        ("GET", "/kvc?list-type=2", Operation.LIST_OBJECTS_V2),
        ("PUT", "/kvc/a//b/../c?x-id=PutObject", Operation.PUT_OBJECT),
        ("POST", "/kvc?layerwise", Operation.LAYERWISE),
        ("POST", "/kvc/?lookup=", Operation.LOOKUP),
        ("POST", "/_objectcache/agents", Operation.REGISTER_AGENT),
        ("POST", "/_objectcache/agents/ab", Operation.RENEW_AGENT),
        ("DELETE", "/_objectcache/requests/ab", Operation.CANCEL_REQUEST),
    ],
)
def test_requests_are_routed_by_what_they_say(method: str, target: str, operation: Operation) -> None:
    request = parse_target(method, target, {})
    assert route(request) is operation


@pytest.mark.parametrize(
    ("method", "target", "code"),
    [
        ("GET", "/kvc", "NotImplemented"),
        ("GET", "/kvc?acl", "NotImplemented"),
        ("POST", "/kvc/key?uploads", "NotImplemented"),
        ("PUT", "/kvc/key?partNumber=1&uploadId=x", "NotImplemented"),
        ("DELETE", "/kvc", "NotImplemented"),
        ("PATCH", "/kvc/key", "MethodNotAllowed"),
        ("GET", "/kvc?layerwise", "MethodNotAllowed"),
        ("GET", "/_objectcache/nothing", "InvalidURI"),
    ],
)
def test_what_is_missing_is_said_to_be_missing(method: str, target: str, code: str) -> None:
    """Never silence or a wrong success."""
    with pytest.raises(CallerError, match=code):
        route(parse_target(method, target, {}))


def test_keys_keep_every_byte_the_client_sent() -> None:
    request = parse_target("GET", "/kvc/a%2Fb//c/../d%20e+%C3%A9?prefix=%2B+", {})
    assert request.key == "a/b//c/../d e+\u00e9"
    assert request.query == (("prefix", "++"),)
    with pytest.raises(CallerError, match="InvalidURI"):
        parse_target("GET", "/kvc/%ff", {})
