"""The connector's options as those of the tier."""

from __future__ import annotations

from typing import Any

import pytest

from nixl_client.connectors.vllm.tier_options import names_tier, tier_options, without_stores
from nixl_client.connectors.vllm_tier.options import TierOptions

AT = {"endpoint": "http://store:9000"}
OURS: dict[str, object] = {"type": "ObjectCacheTier", **AT}
ENGINE = {"spec_name", "spec_module_path", "cpu_bytes_to_use"}


def parsed(extra: dict[str, object], worker_count: int = 1, *, is_storing: bool = True) -> TierOptions:
    given = tier_options(extra, worker_count, is_storing=is_storing)
    return TierOptions.of({name: value for name, value in given.items() if name not in ENGINE})


def test_what_is_not_set_has_the_tiers_default() -> None:
    assert parsed(dict(AT)) == TierOptions.of(AT)
    assert "cpu_bytes_to_use" not in tier_options(AT, 1, is_storing=True)


def test_options_of_both_are_taken_over_wherever_they_stand() -> None:
    found = parsed({**AT, "bucket": "b", "transport": "http", "retry_s": 1.0, "internals": {"lease_s": 7.0}})
    assert (found.bucket, found.transport.value, found.retry_s, found.lease_s) == ("b", "http", 1.0, 7.0)


def test_options_that_only_layers_have_are_left_out() -> None:
    assert parsed({**AT, "chunk_tokens": 64, "lossy": 0.1, "internals": {"load": "all"}}) == TierOptions.of(AT)


@pytest.mark.parametrize(
    ("staging", "worker_count", "wanted"), [(1 << 20, 1, 1 << 20), ("64MiB", 2, 128 << 20), (0, 2, None)]
)
def test_the_buffer_of_each_worker_is_its_part_of_vllms_host_memory(
    staging: Any, worker_count: int, wanted: int | None
) -> None:
    given = tier_options({**AT, "staging_bytes": staging}, worker_count, is_storing=True)
    assert given.get("cpu_bytes_to_use") == wanted
    assert parsed({**AT, "staging_bytes": staging}).staging_bytes == TierOptions("x").staging_bytes


def test_a_name_of_the_weights_tells_names_apart_however_long_it_is() -> None:
    assert parsed({**AT, "model": "mine-2"}).epoch == "mine-2"
    one, other = (parsed({**AT, "model": "m" * 200 + letter}).epoch for letter in "ab")
    assert one != other


def test_an_engine_that_is_not_to_store_does_not() -> None:
    assert [
        parsed({**AT, "store": store}, is_storing=role).store for store, role in ((True, False), (False, True))
    ] == [
        False,
        False,
    ]


def test_options_of_the_tier_are_told_from_those_of_the_connector() -> None:
    assert names_tier({**AT, "spec_name": "ObjectCacheTieringSpec"})
    assert names_tier({"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs"}, OURS]})
    for other in ({}, {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs"}]}, {"spec_name": None}):
        assert not names_tier({**AT, **other})


def test_an_engine_that_only_loads_stores_nothing_wherever_its_tier_is_named() -> None:
    other = {"type": "fs", "root_dir": "/x"}
    found = without_stores({"spec_name": "TieringOffloadingSpec", "secondary_tiers": [other, OURS]})
    assert found["secondary_tiers"] == [other, {**OURS, "store": False}]
    assert without_stores({**AT, "spec_name": "ObjectCacheTieringSpec"})["store"] is False


def test_what_cannot_be_is_refused() -> None:
    for extra in (
        {"bucket": "b"},
        {**AT, "unknown": 1},
        {**AT, "internals": {"endpoint": "x"}},
        {**AT, "internals": 3},
    ):
        with pytest.raises(ValueError, match=r".+"):
            tier_options(extra, 1, is_storing=True)
