"""Whatever bytes come over a socket, the gateway answers them or ends the connection."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.seeds import seeds
from tests.support.mutations import mutations
from tests.support.small_gateway import SmallGateway, small_gateway


@pytest.fixture(scope="module")
def gateway() -> Iterator[SmallGateway]:
    with small_gateway(body_idle_timeout_s=0.1) as running:
        yield running


@settings(max_examples=150)
@given(
    data=st.one_of(st.binary(max_size=200), st.sampled_from([*seeds("request"), *seeds("headers")]).flatmap(mutations))
)
def test_no_bytes_on_a_socket_make_a_500(gateway: SmallGateway, data: bytes) -> None:
    """All of aiohttp and the gateway between: whatever the head, it is answered or the connection ends."""
    first, *rest = data.split(b"\n")
    wire = b"\r\n".join([first + b" HTTP/1.1", *rest]) + b"\r\n\r\n"
    answer = b""
    with gateway.connect() as sock, contextlib.suppress(ConnectionResetError):
        sock.sendall(wire)
        while b"\r\n" not in answer and (piece := sock.recv(65_536)):
            answer += piece
    assert re.match(rb"HTTP/1\.[01] (?!500)[1-5]|\Z", answer), answer
