"""Names of choices a caller may give."""

from __future__ import annotations

import pytest

from descriptors.descriptor import Delivery, OnMissing
from nixl_client.client import Transport
from nixl_client.connectors.lmcache import options as lmcache
from nixl_client.connectors.vllm import options as vllm
from nixl_client.objects import Path
from nixl_client.options import enum_member


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (Delivery, "delivery", "layer-mayor"),
        (OnMissing, "on_missing", "ignore"),
        (Transport, "transport", "SHM"),
        (Path, "path", ""),
        (Delivery, "delivery", None),
        (Delivery, "delivery", OnMissing.FAIL),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(kind: type, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as refused:
        enum_member(kind, value, name)  # type: ignore[arg-type]
    for member in kind:  # type: ignore[attr-defined]
        assert repr(member.value) in str(refused.value)
        assert enum_member(kind, member.value, name) is enum_member(kind, member, name) is member


@pytest.mark.parametrize("options", [vllm.VllmOptions, lmcache.LMCacheOptions])
def test_sizes_of_a_connector_may_be_written_with_a_unit(
    options: type[vllm.VllmOptions | lmcache.LMCacheOptions],
) -> None:
    """JSON has no other way to say 256 MiB, and YAML reads 1e9 as text or as a float."""
    where = {"endpoint": "http://here", "bucket": "kv"}
    for written, nbytes in (("256MiB", 256 << 20), ("1e9", 10**9), (1e9, 10**9), (4096, 4096)):
        assert options.of({**where, "staging_bytes": written}).staging_bytes == nbytes
    with pytest.raises(ValueError, match=r"staging_bytes: 'much' is no size"):
        options.of({**where, "staging_bytes": "much"})
    with pytest.raises(ValueError, match="staging_bytes must be of type int"):
        options.of({**where, "staging_bytes": 1.5})
    with pytest.raises(ValueError, match="store_queue_chunks must be of type int"):
        options.of({**where, "store_queue_chunks": "8"})
