"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.units import GIB, parse_bytes


@given(st.integers(0, 10**20 - 1))
def test_a_size_in_bytes_is_read_to_the_byte(nbytes: int) -> None:
    assert parse_bytes(str(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("9007199254740993", 2**53 + 1),
        ("1.5GiB", 3 * GIB // 2),
        ("200e9", 200 * 10**9),
        ("0.1 kb", 100),
        ("1e3 MB", 10**9),
        ("18446744073709551615", 2**64 - 1),
    ],
)
def test_sizes_with_units(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "1.2.3", "1i", "1e999", "9" * 21, "\u0661KB"])
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)
