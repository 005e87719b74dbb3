"""The wishes in `kv_transfer_params` mean here what they mean to vLLM's own offloading."""

from __future__ import annotations

import pytest

from nixl_client.connectors.vllm.limits import NO_LIMITS, TransferLimits, transfer_limits


@pytest.mark.parametrize(
    ("tiers", "load_tokens"),
    [
        ([], 0),
        ([{"medium": "CPU"}], 0),
        ([{"locality": "local"}], 0),
        ([{"medium": "STORAGE", "locality": "LOCAL"}], 0),
        ([{"medium": "storage"}], None),
        ([{"medium": "CPU"}, {"locality": "REMOTE"}], None),
        ([{}], None),
        ([{"medium": None}], None),
        ([{"medium": "TAPE"}], None),
        ([{"medium": 3}, "CPU"], None),
        ([{"medium": "TAPE"}, {"medium": "CPU"}], 0),
        ("CPU", None),
        (None, None),
    ],
)
def test_a_request_may_say_from_which_tiers_it_loads(tiers: object, load_tokens: int | None) -> None:
    assert transfer_limits({"kv_load_tiers": tiers}) == TransferLimits(load_tokens)


def test_the_tokens_of_a_request_may_be_bounded() -> None:
    assert transfer_limits({"max_load_tokens": 64, "max_offload_tokens": 0}) == TransferLimits(64, 0)
    assert transfer_limits({"max_load_tokens": 64, "kv_load_tiers": []}) == TransferLimits(0)


@pytest.mark.parametrize("params", [None, {}, [], "x", {"max_load_tokens": -1, "max_offload_tokens": True}])
def test_what_makes_no_sense_limits_nothing(params: object) -> None:
    assert transfer_limits(params) == NO_LIMITS
