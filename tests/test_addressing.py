"""Which bucket and key a request means: in the path or in the Host header, with every byte a key may have."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.errors import CallerError, ErrorCode, ServerError
from gateway.addressing import bucket_from_host
from gateway.request import check_key, parse_target
from tests.small_gateway import SmallGateway, answer, head_of, signed_headers, small_gateway

DOMAINS = ("s3.example.com", "example.com")


@pytest.fixture(scope="module")
def gateway() -> Iterator[SmallGateway]:
    with small_gateway(domains=DOMAINS) as running:
        yield running


@pytest.mark.parametrize(
    ("host", "bucket"),
    [
        ("kvc.s3.example.com", "kvc"),
        ("kvc.s3.example.com:9000", "kvc"),
        ("KVC.S3.Example.com.", "kvc"),
        ("a.b.c.s3.example.com", "a.b.c"),
        ("s3.example.com", None),
        ("example.com", None),
        ("kvc.example.com", "kvc"),
        ("kvc.localhost:9000", "kvc"),
        ("localhost:9000", None),
        ("localhost", None),
        (".localhost", None),
        ("notlocalhost", None),
        ("kvc.s3.example.org", None),
        ("127.0.0.1:9000", None),
        ("10.0.0.1", None),
        ("[::1]:9000", None),
        ("", None),
        (None, None),
    ],
)
def test_a_host_below_a_configured_domain_names_the_bucket(host: str | None, bucket: str | None) -> None:
    """An address never does, whatever domains there are; the longest domain wins."""
    assert bucket_from_host(host, DOMAINS) == bucket
    assert bucket_from_host(host, (*DOMAINS, "0.0.1")) == bucket


@pytest.mark.parametrize(
    "host", ["a b.localhost", "x,y.localhost", "kvc.localhost:port", "h" * 600, "\udcff.localhost", "a/b"]
)
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(CallerError, match="InvalidRequest"):
        bucket_from_host(host, DOMAINS)


def test_below_a_bucket_of_the_host_the_whole_path_is_the_key() -> None:
    for target, key in (("/", ""), ("/a/b", "a/b"), ("//a", "/a"), ("/_objectcache/agents", "_objectcache/agents")):
        request = parse_target("GET", target, {"host": "kvc.localhost"})
        assert (request.bucket, request.key) == ("kvc", key)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://h/b/k?x", "/b/k"),
        ("HTTP://h", "/"),
        ("http://h?x", "/"),
        ("http://[/b", "/b"),
        ("/b/k#f", "/b/k#f"),
    ],
)
def test_absolute_targets_mean_their_path(target: str, path: str) -> None:
    """RFC 9112, 3.2.2: a server accepts them, though only proxies get them."""
    assert parse_target("GET", target, {}).path == path


@pytest.mark.parametrize("target", ["*", "h:443", "b/k", "", "/%ff", "/a?b=%80", "/\udcff"])
def test_targets_that_are_no_path_or_no_utf8_are_invalid(target: str) -> None:
    with pytest.raises(CallerError, match="InvalidURI"):
        parse_target("GET", target, {})


@given(st.text(min_size=1, max_size=200))
def test_any_text_is_a_key_and_survives_its_encoding(key: str) -> None:
    """Dots, slashes, NUL and all: a key is any UTF-8, and no two encodings of it differ."""
    encoded = quote(key, safe="/")
    request = parse_target("GET", f"/b/{encoded}", {})
    assert (request.bucket, request.key, request.raw_path) == ("b", key, f"/b/{encoded}")
    check_key(request.key)


KEYS = [
    "plain",
    "a//b///c",
    "../up/./here/..",
    ".",
    "..",
    "a+b c&d=e",
    "\u4e16\u754c/\U0001f600",
    "%2F",
    "a\x01\x7f",
    "/lead",
    "trail/",
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("host", ["bucket.s3.example.com", "h"])
def test_keys_arrive_as_they_were_meant_in_both_styles(gateway: SmallGateway, host: str, key: str) -> None:
    target = f"/{quote(key, safe='/')}" if host != "h" else f"/bucket/{quote(key, safe='/')}"
    with gateway.connect() as sock:
        headers = signed_headers("PUT", target, {}, host=host) | {"Content-Length": "1"}
        sock.sendall(head_of("PUT", target, headers) + b"x")
        assert answer(sock).status == 200
        assert ("bucket", key) in gateway.storage.objects
        sock.sendall(head_of("GET", target, signed_headers("GET", target, {}, host=host)))
        assert answer(sock).body == b"x"


def test_a_request_signed_for_one_bucket_is_no_request_for_another(gateway: SmallGateway) -> None:
    """The bucket is in the Host header, which is always signed."""
    headers = signed_headers("GET", "/k", {}, host="one.s3.example.com") | {"Host": "two.s3.example.com"}
    with gateway.connect() as sock:
        sock.sendall(head_of("GET", "/k", headers))
        assert answer(sock).code == "SignatureDoesNotMatch"


def test_every_answer_names_its_request_and_errors_repeat_it(gateway: SmallGateway) -> None:
    gateway.storage.objects["b", "k"] = b"x"
    ids = set()
    for method, target, status in (("GET", "/b/k", 200), ("GET", "/b/no", 404), ("HEAD", "/b/no", 404)):
        with gateway.connect() as sock:
            sock.sendall(head_of(method, target, signed_headers(method, target, {})))
            reply = answer(sock, method)
        assert reply.status == status
        assert reply.headers["x-amz-id-2"]
        ids.add(reply.headers["x-amz-request-id"])
        if method == "HEAD":
            assert not reply.body
        elif status != 200:
            for part in (reply.headers["x-amz-request-id"], "<Resource>/b/no</Resource>", "<Code>NoSuchKey</Code>"):
                assert part.encode() in reply.body
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("failure", "status", "code", "retry_after"),
    [
        (ServerError(ErrorCode.SLOW_DOWN, "later", retryable=True), 503, "SlowDown", "1"),
        (ZeroDivisionError("a secret detail"), 500, "InternalError", None),
        (CallerError(ErrorCode.METHOD_NOT_ALLOWED, "not here", field="method"), 405, "MethodNotAllowed", None),
    ],
)
def test_failures_are_told_in_s3s_words(
    gateway: SmallGateway, failure: Exception, status: int, code: str, retry_after: str | None
) -> None:
    """With when to come back, and never with a trace."""
    gateway.storage.failures["failing"] = failure
    with gateway.connect() as sock:
        sock.sendall(head_of("GET", "/b/failing", signed_headers("GET", "/b/failing", {})))
        reply = answer(sock)
    assert (reply.status, reply.code, reply.headers.get("retry-after")) == (status, code, retry_after)
    assert b"secret" not in reply.body


def test_health_is_the_services_and_never_hides_a_key(gateway: SmallGateway) -> None:
    with gateway.connect() as sock:
        sock.sendall(head_of("GET", "/_objectcache/health", {"Host": "127.0.0.1"}))
        assert answer(sock).status == 200
        sock.sendall(head_of("GET", "/_objectcache/health", {"Host": "bucket.localhost"}))
        assert answer(sock).code == "AccessDenied"
