"""The header that says where the time went."""

from __future__ import annotations

import pytest

from descriptors.tracing import (
    ServerTiming,
    parse_timing,
    timing_header,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gateway;dur=0.31, storage;dur=2.10, transfer;dur=5.00", ServerTiming(0.00031, 0.0021, 0.005)),
        ("transfer;dur=5,gateway;dur=1", ServerTiming(0.001, 0.0, 0.005)),
        ("gateway;dur=1, cache;dur=7, gateway;dur=9", ServerTiming(0.001)),
        ("gateway;dur=-1, storage;dur=nan, transfer;dur=1e9", ServerTiming()),
        ("gateway;desc=x;dur=1, storage", ServerTiming()),
        ("gateway;dur=1," * 40, ServerTiming()),
        ("", ServerTiming()),
        (None, ServerTiming()),
    ],
)
def test_a_timing_header_is_read_as_far_as_it_is_understood(text: str | None, expected: ServerTiming) -> None:
    """Another server, or a later version of ours, may say more, less, or something else."""
    read = parse_timing(text)
    assert (read.gateway_s, read.storage_s, read.transfer_s) == pytest.approx(
        (expected.gateway_s, expected.storage_s, expected.transfer_s)
    )


def test_what_is_written_is_read_back() -> None:
    read = parse_timing(timing_header(ServerTiming(0.000312, 0.0021, 12.5)))
    assert (read.gateway_s, read.storage_s, read.transfer_s) == pytest.approx((0.000312, 0.0021, 12.5))
    assert timing_header(ServerTiming()) == "gateway;dur=0.000, storage;dur=0.000, transfer;dur=0.000"
