"""Sizes and ranges of a chunk, and units of rates."""

from __future__ import annotations

import pytest

from descriptors.layout import ChunkLayout, slice_bytes
from descriptors.units import KIB, MIB, bytes_per_s_from_gbps, gbps_from_bytes_per_s


def test_llama_31_8b_has_64_kib_slices_at_16_tokens() -> None:
    """Eq. 1 with 8 KV heads of 128 in bf16: the paper's S, and 1 MiB at 256 tokens."""
    assert slice_bytes(16, 8, 128, 2) == 64 * KIB
    assert slice_bytes(256, 8, 128, 2) == MIB


def test_a_layer_is_one_range_of_a_chunk_and_one_block_of_a_payload() -> None:
    layout = ChunkLayout(32, 16, 65536)
    assert layout.chunk_bytes == 2 * MIB
    assert layout.layer_range(3) == (3 * 65536, 65536)
    assert layout.layer_offset(3, 10) == 3 * 10 * 65536
    with pytest.raises(IndexError):
        layout.layer_range(32)


def test_gbps_are_decimal_bits() -> None:
    assert bytes_per_s_from_gbps(100) == 12.5e9
    assert gbps_from_bytes_per_s(12.5e9) == 100
