"""What the headers of a descriptor GET's answer say."""

from __future__ import annotations

from collections.abc import Mapping

from descriptors.notices import Mode
from descriptors.storage_api import Grant
from nixl_client.ledger import ProtocolViolationError

MODE_HEADER = "x-amz-objectcache-mode"
CHUNKS_HEADER = "x-amz-objectcache-chunks"
RATE_HEADER = "x-amz-objectcache-rate"
EPOCH_HEADER = "x-amz-objectcache-epoch"
RDMA_BYTES_HEADER = "x-amz-rdma-bytes-transferred"


def grant(headers: Mapping[str, str]) -> Grant:
    """Rate and epoch; none of them where the server does not pace."""
    rate, epoch = headers.get(RATE_HEADER, "0"), headers.get(EPOCH_HEADER, "0")
    if not (rate.isdecimal() and epoch.isdecimal()):
        raise ProtocolViolationError(f"rate {rate!r} and epoch {epoch!r} are no numbers")
    return Grant(int(rate), int(epoch))


def payload_shape(headers: Mapping[str, str]) -> tuple[Mode, int]:
    """Mode and k. Raises ProtocolViolationError when they are not there."""
    try:
        return Mode(headers[MODE_HEADER]), int(headers[CHUNKS_HEADER])
    except (KeyError, ValueError) as error:
        raise ProtocolViolationError(f"the answer does not say mode and chunks: {error}") from error
