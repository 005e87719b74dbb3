"""A server may answer anything: a client of ours raises its own errors, and believes nothing that cannot be."""

from __future__ import annotations

import pytest

from descriptors.layout import ChunkLayout
from descriptors.recompute import AdviceRequest, PrefillCosts
from nixl_client.client import Client
from nixl_client.session.signed_http import SignedAnswer, SignedHttp
from nixl_client.transports.http import UnansweredError

BODIES = [
    b"", b"garbage", b"[]", b"null", b"{}", b'{"matched": null}', b'{"matched": "x"}', b'{"matched": 1e400}',
    b'{"matched": -1}', b'{"matched": 3}', b'{"matched": [1]}', b"[" * 100_000, b'{"matched": 1' + b"0" * 5000 + b"}",
]  # fmt: skip
LAYOUT = ChunkLayout(num_layers=2, chunk_tokens=16, per_layer_chunk_bytes=4096)


@pytest.mark.parametrize("body", BODIES, ids=[each[:20].decode() for each in BODIES])
def test_a_lookups_answer(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SignedHttp, "request", lambda *_, **__: SignedAnswer({}, body))
    keys = ["a" * 64, "b" * 64]
    with Client("http://127.0.0.1:1", "bucket", access_key="A", secret_key="s") as client:
        with pytest.raises(UnansweredError, match="makes no sense"):
            client.lookup(keys)
        with pytest.raises(UnansweredError, match="makes no sense"):
            client.advise(keys, AdviceRequest(64, LAYOUT, PrefillCosts(1.0)))


@pytest.mark.parametrize("body", [b"[]", b"{", b'"x"', b"[" * 100_000])
def test_an_answer_that_is_no_object(body: bytes) -> None:
    with pytest.raises(UnansweredError) as raised:
        SignedAnswer({}, body).json()
    assert not raised.value.retryable
