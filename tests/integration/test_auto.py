"""`transport="auto"` takes the fastest way that works."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nixl_client.transports.transport import Transport
from tests.support.chunks import LAYOUT, N, make_chunks
from tests.support.requests import request
from tests.support.servers import LocalStack

HAS_INFINIBAND = "nixl_client.fetch.routes.has_infiniband"


@pytest.mark.slow
@pytest.mark.with_ucx
@pytest.mark.parametrize(
    ("has_infiniband", "wanted"), [(False, Transport.HTTP), (True, Transport.UCX)], ids=["without RDMA", "with RDMA"]
)
def test_ucx_is_taken_where_this_host_has_rdma(
    local: LocalStack,
    keys: list[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_infiniband: bool,
    wanted: Transport,
) -> None:
    """The server offers ucx in both cases. Over TCP http moves more than ucx does. The RDMA device is played."""
    assert b'"ucx": true' in request(local.url, "GET", "/_objectcache/transports").body
    monkeypatch.setattr(HAS_INFINIBAND, lambda: has_infiniband)
    buffer = np.zeros(LAYOUT.delivery_bytes(N), dtype=np.uint8)
    with local.client("chunks", "auto") as client:
        assert client.register_buffer(buffer) is wanted
        fetch = client.fetch(keys, LAYOUT, buffer, delivery="chunk-major")
        fetch.wait(60)
        assert fetch.transport is wanted
        assert buffer.tobytes() == make_chunks(N, LAYOUT)[1].tobytes()


@pytest.mark.parametrize("has_infiniband", [False, True])
def test_shared_memory_comes_before_both(
    local: LocalStack, keys: list[str], monkeypatch: pytest.MonkeyPatch, *, has_infiniband: bool
) -> None:
    monkeypatch.setattr(HAS_INFINIBAND, lambda: has_infiniband)
    with local.client("chunks", "auto") as client:
        assert client.register_buffer(client.allocate_buffer(LAYOUT.delivery_bytes(N))) is Transport.SHM


def test_http_is_taken_where_rdma_is_here_and_the_server_offers_no_ucx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HAS_INFINIBAND, lambda: True)
    with (
        LocalStack(tmp_path) as server,
        server.client("chunks", "auto") as client,
    ):
        assert client.register_buffer(np.zeros(4096, dtype=np.uint8)) is Transport.HTTP
