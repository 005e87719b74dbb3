"""TTFT and the rates without a stall: numbers from the paper."""

from __future__ import annotations

import pytest

from descriptors.ttft import stall_s, ttft_chunkwise_s, ttft_layerwise_s, zero_stall_rate_bytes_per_s
from tests.support.tree import paper_tables

TABLES = paper_tables()


def test_eq3_hides_transfer_under_compute() -> None:
    """X_0 + sum max(X_{l+1}, C_l) + C_{L-1}."""
    assert ttft_layerwise_s([1, 1, 1], [2, 2, 2]) == 1 + 2 + 2 + 2
    assert ttft_layerwise_s([3, 3, 3], [2, 2, 2]) == 3 + 3 + 3 + 2
    assert ttft_chunkwise_s([3, 3, 3], [2, 2, 2]) == 15
    with pytest.raises(ValueError, match="one entry per layer"):
        ttft_layerwise_s([1], [])


@pytest.mark.parametrize("row", TABLES["table_a8"], ids=lambda row: f"{row['context']}-{row['hit_rate']}")
def test_zero_stall_rates_are_those_of_table_a8(row: dict[str, float]) -> None:
    """B_req = D/t (paper, section 5.3): 4,096 bytes a token and layer, GB/s as 2^30 bytes rounded to 0.01."""
    layer_bytes = row["cached_tokens"] * 4096
    compute_s = row["compute_ms_total"] / 32 / 1000
    rate = zero_stall_rate_bytes_per_s(layer_bytes, compute_s)
    printed = row["required_gbytes_per_s"]
    assert min(abs(rate / 1e9 - printed), abs(rate / 2**30 - printed)) <= 0.011
    assert stall_s(layer_bytes, rate, compute_s) == pytest.approx(0, abs=1e-12)
