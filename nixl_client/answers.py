"""What the headers of a descriptor GET's answer say."""

from __future__ import annotations

from collections.abc import Mapping

from descriptors.notices import Mode
from nixl_client.ledger import ProtocolViolationError

MODE_HEADER = "x-amz-objectcache-mode"
CHUNKS_HEADER = "x-amz-objectcache-chunks"
RDMA_BYTES_HEADER = "x-amz-rdma-bytes-transferred"


def payload_shape(headers: Mapping[str, str]) -> tuple[Mode, int]:
    """Mode and k. Raises ProtocolViolationError when they are not there."""
    try:
        return Mode(headers[MODE_HEADER]), int(headers[CHUNKS_HEADER])
    except (KeyError, ValueError) as error:
        raise ProtocolViolationError(f"the answer does not say mode and chunks: {error}") from error
