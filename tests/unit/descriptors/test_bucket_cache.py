"""The header of a bucket that is a cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.objects import CACHE_BYTES_MAX, CACHE_BYTES_MIN, BucketCache


@given(st.none() | st.integers(CACHE_BYTES_MIN, CACHE_BYTES_MAX))
def test_the_text_of_a_cache_says_it_whole(capacity_bytes: int | None) -> None:
    assert BucketCache.of_text(BucketCache(capacity_bytes).text()) == BucketCache(capacity_bytes)


@pytest.mark.parametrize(("text", "capacity_bytes"), [("Auto", None), ("64MiB", 64 << 20), ("2e9", 2_000_000_000)])
def test_sizes_are_written_as_people_write_them(text: str, capacity_bytes: int | None) -> None:
    assert BucketCache.of_text(text) == BucketCache(capacity_bytes)


@pytest.mark.parametrize(
    "text", ["", "80%", "1", "-5GB", "9" * 4000, "1e99", "1" + " " * 4000 + "GB", "1.5.5GB", "1\r\nGB"]
)
def test_what_is_no_size_of_a_cache_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|cache"):
        BucketCache.of_text(text)
