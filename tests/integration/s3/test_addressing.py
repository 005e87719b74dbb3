"""Bucket and key of a request as the gateway understands them, in the path or in the Host header."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest

from descriptors.errors import CallerError, ErrorCode, ServerError
from tests.support.small_gateway import SmallGateway, answer, head_of, signed_headers, small_gateway

DOMAINS = ("s3.example.com", "example.com")


@pytest.fixture(scope="module")
def gateway() -> Iterator[SmallGateway]:
    with small_gateway(domains=DOMAINS) as running:
        yield running


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
        assert ("bucket", key) in gateway.storage.stored
        sock.sendall(head_of("GET", target, signed_headers("GET", target, {}, host=host)))
        assert answer(sock).body == b"x"


def test_a_request_signed_for_one_bucket_is_no_request_for_another(gateway: SmallGateway) -> None:
    """The bucket is in the Host header, which is always signed."""
    headers = signed_headers("GET", "/k", {}, host="one.s3.example.com") | {"Host": "two.s3.example.com"}
    with gateway.connect() as sock:
        sock.sendall(head_of("GET", "/k", headers))
        assert answer(sock).code == "SignatureDoesNotMatch"


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/b/k", 200),
        ("GET", "/b/k?response-content-type=text%2Fhtml", 200),
        ("HEAD", "/b/k", 200),
        ("GET", "/b/k", 206),
        ("GET", "/b/%3Cscript%3E", 404),
        ("GET", "/b/k", 403),
        ("GET", "/_objectcache/health", 200),
        ("nothing", "", 400),
    ],
)
def test_a_browser_runs_nothing_of_an_answer(gateway: SmallGateway, method: str, target: str, status: int) -> None:
    """Objects share their origin with the page on which operators type their keys."""
    gateway.storage.stored["b", "k"] = b"<script>alert(1)</script>"
    sent = {"Range": "bytes=0-3"} if status == 206 else {}
    headers = signed_headers(method, target, sent)
    if status == 403:
        headers["Authorization"] = headers["Authorization"][:-1] + "x"
    with gateway.connect() as sock:
        sock.sendall(head_of(method, target, headers) if target else b"nothing\r\n\r\n")
        reply = answer(sock, method)
    assert reply.status == status
    assert reply.headers["content-security-policy"] == "sandbox"
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_the_page_for_people_runs_its_own_script(gateway: SmallGateway) -> None:
    with gateway.connect() as sock:
        sock.sendall(head_of("GET", "/_objectcache/", {"Host": "h"}))
        assert answer(sock).headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")


def test_every_answer_names_its_request_and_errors_repeat_it(gateway: SmallGateway) -> None:
    gateway.storage.stored["b", "k"] = b"x"
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
