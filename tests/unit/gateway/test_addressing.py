"""Which bucket and key a Host header and a request target name."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.errors import CallerError
from gateway.s3.addressing import bucket_from_host
from gateway.s3.request import check_key, parse_target

DOMAINS = ("s3.example.com", "example.com")


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
