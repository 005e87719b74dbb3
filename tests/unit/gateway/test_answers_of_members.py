"""A member of the cluster may answer anything: it counts as one that cannot be reached, and others are asked."""

from __future__ import annotations

import pytest

from descriptors.peer_auth import PeerSecrets
from descriptors.peer_calls import CALLS
from gateway.storage_client import RemoteStorage, StorageUnreachableError, _decoded

NONSENSE = [
    b"",
    b"garbage",
    b"null",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b"\xff",
    b'{"buckets": 1e400}',
    b"[1" + b",1" * 10**5 + b"]",
]


@pytest.mark.parametrize("operation", ["objects.head_bucket", "objects.list_objects", "prefixes.lookup"])
@pytest.mark.parametrize("result", NONSENSE, ids=[each[:12].decode("latin-1") for each in NONSENSE])
async def test_nonsense_is_no_answer(operation: str, result: bytes) -> None:
    with pytest.raises(StorageUnreachableError, match="cannot be reached"):
        await _decoded(CALLS[operation], result)


@pytest.mark.parametrize("host", ["a..b", "a" * 250])
async def test_a_member_at_an_address_that_cannot_be_is_not_reached(host: str) -> None:
    """One such entry among the members made each request of the cluster fail with 500."""
    storage = RemoteStorage(f"http://{host}:80", PeerSecrets(b"s" * 32))
    await storage.start()
    try:
        with pytest.raises(StorageUnreachableError) as missed:
            await storage.status.transports("")
        assert missed.value.never_connected
    finally:
        await storage.close()
