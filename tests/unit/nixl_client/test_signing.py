"""A large body is signed by its SHA-256, or has a CRC-32C where nobody can change it on its way."""

from __future__ import annotations

import hashlib
from base64 import b64encode

import pytest

from nixl_client.session.signed_http import CHECKSUM_HEADER, SUMMED_BYTES_MIN, SignedHttp
from objectcache.adapters.native import crc32c

LARGE = bytes(range(256)) * (SUMMED_BYTES_MIN // 256)
HASH = "X-Amz-Content-SHA256"


def signed(endpoint: str, method: str, body: bytes) -> dict[str, str]:
    http = SignedHttp(endpoint, "key", "secret", "us-east-1", 1.0)
    try:
        return http._sign(method, "/bucket/key", memoryview(body), {})
    finally:
        http.close()


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://[::1]:9", "http://localhost:9", "https://far:9"])
def test_within_a_host_and_over_tls_a_checksum_is_enough(endpoint: str) -> None:
    """Hashing took half of the time of a put. The checksum is signed with the other headers."""
    headers = signed(endpoint, "PUT", LARGE)
    assert headers[HASH] == "UNSIGNED-PAYLOAD"
    assert headers[CHECKSUM_HEADER] == b64encode(crc32c(LARGE).to_bytes(4, "big")).decode()
    assert CHECKSUM_HEADER in headers["Authorization"]
    assert headers["Content-Length"] == str(len(LARGE))


@pytest.mark.parametrize(
    ("endpoint", "method", "body"),
    [
        ("http://10.0.0.1:9", "PUT", LARGE),
        ("http://store:9", "PUT", LARGE),
        ("http://localhost.example:9", "PUT", LARGE),
        ("http://127.0.0.1:9", "PUT", LARGE[1:]),
        ("http://127.0.0.1:9", "POST", LARGE),
    ],
)
def test_otherwise_the_body_is_signed(endpoint: str, method: str, body: bytes) -> None:
    headers = signed(endpoint, method, body)
    assert headers[HASH] == hashlib.sha256(body).hexdigest()
    assert CHECKSUM_HEADER not in headers
    assert headers["Content-Length"] == str(len(body))
