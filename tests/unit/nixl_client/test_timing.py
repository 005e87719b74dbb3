"""The client's share of a request's time."""

from __future__ import annotations

import pytest

from descriptors.tracing import (
    TIMING_HEADER,
)
from nixl_client.session.timing import Timing, split_time


def test_the_clients_part_is_what_the_others_leave() -> None:
    """Reading a body is transfer; an answer that says nothing leaves all to the client; no part is below nothing."""
    header = {TIMING_HEADER: "gateway;dur=1, storage;dur=2, transfer;dur=3"}
    split = split_time(0.01, header, 0.002)
    assert (split.client_s, split.transfer_s) == pytest.approx((0.002, 0.005))
    assert split_time(0.01, {}) == Timing(0.01, 0.0, 0.0, 0.0)
    assert split_time(0.001, header).client_s == 0.0
