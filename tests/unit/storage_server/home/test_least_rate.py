"""When a body comes too slowly."""

from __future__ import annotations

from descriptors.units import KIB
from storage_server.home.rules.least_rate import READ_BYTES_PER_S_MIN, LeastRate


def test_each_window_needs_its_bytes() -> None:
    """A body that was fast before is too slow all the same."""
    assert READ_BYTES_PER_S_MIN == 16 * KIB
    rate = LeastRate(10.0)
    assert not rate.is_too_slow(9.0, 100_000_000)
    assert not rate.is_too_slow(1.0, 0)
    assert not rate.is_too_slow(5.0, 0)
    assert not rate.is_too_slow(5.0, 160 * KIB)
    assert not rate.is_too_slow(9.9, 1)
    assert rate.is_too_slow(0.1, 160 * KIB - 2)


def test_a_byte_before_each_time_limit_is_too_slow() -> None:
    rate = LeastRate(30.0)
    assert not rate.is_too_slow(29.0, 1)
    assert rate.is_too_slow(29.0, 1)


def test_a_reader_that_does_not_wait_is_in_no_window() -> None:
    """A client that takes the bytes slowly says nothing of the service."""
    rate = LeastRate(10.0)
    assert not any(rate.is_too_slow(0.0, 1) for _ in range(1000))
