"""GatewaySettings."""

from __future__ import annotations

import pytest

from descriptors.descriptor import DESCRIPTOR_BYTES_MAX
from gateway.settings import GatewaySettings


def test_gateways_that_share_a_port_share_its_limits() -> None:
    """Each process counts by itself, so each may count up to its share only."""
    whole = GatewaySettings(connections_max=100, document_bytes=512 << 20, document_key_bytes=64 << 20)
    share = whole.share_of(3)
    assert (share.connections_max, share.document_bytes, share.document_key_bytes) == (33, (512 << 20) // 3, 22369621)
    assert whole.share_of(1) == whole


@pytest.mark.parametrize("gateway_count", [5, 17, 20_000])
def test_a_share_has_room_for_one_document_and_one_connection(gateway_count: int) -> None:
    share = GatewaySettings().share_of(gateway_count)
    assert DESCRIPTOR_BYTES_MAX <= share.document_key_bytes <= share.document_bytes
    assert share.connections_max >= 1
