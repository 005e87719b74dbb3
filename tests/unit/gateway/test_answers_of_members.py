"""A member of the cluster may answer anything: it counts as one that cannot be reached, and others are asked."""

from __future__ import annotations

import pytest

from descriptors.peer_calls import CALLS
from gateway.storage_client import StorageUnreachableError, _decoded

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
