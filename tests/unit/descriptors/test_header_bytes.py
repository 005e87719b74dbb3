"""Secrets in headers, whatever bytes clients send there."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.header_bytes import header_bytes, is_secret
from descriptors.peer_auth import PeerSecrets, check_call, sign_call
from gateway.metrics import is_bearer

SECRETS = PeerSecrets(b"a-secret-of-its-own")


@given(st.binary(max_size=40))
def test_the_bytes_come_back_and_are_no_secret(sent: bytes) -> None:
    """aiohttp decodes headers like this. `str.encode` alone would fail, and be told as an error of the server."""
    text = sent.decode(errors="surrogateescape")
    assert header_bytes(text) == sent
    assert not is_secret(text, "a-token-of-sixteen-letters")
    assert not is_bearer(f"Bearer {text}", "a-token-of-sixteen-letters")


def test_each_of_several_secrets_counts() -> None:
    assert is_secret("two", "one", "two")
    assert not is_secret("three", "one", "two")
    assert not is_secret("three")


@pytest.mark.parametrize("field", range(4))
def test_a_peers_signature_of_any_bytes_is_refused(field: int) -> None:
    now_s = time.time()
    fields = sign_call(SECRETS.signing, "put", "e30=", "0" * 64, now_s).split(" ")
    assert check_call(SECRETS, " ".join(fields), "put", "e30=", now_s) == "0" * 64
    fields[field] = b"\xff\xfe".decode(errors="surrogateescape")
    assert check_call(SECRETS, " ".join(fields), "put", "e30=", now_s) is None
    assert check_call(SECRETS, " ".join(fields), "put", "\udcff", now_s) is None
