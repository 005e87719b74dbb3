"""Where chunks lie, as lookups tell it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.messages import (
    LookupAnswer,
    LookupRequest,
    lookup_answer_body,
    lookup_body,
    parse_lookup,
    parse_lookup_answer,
)
from descriptors.tiers import Tier, counts_of, parse_tiers, runs_of


@given(st.lists(st.sampled_from(Tier), max_size=30))
def test_runs_travel_and_count_every_chunk_once(tiers: list[Tier]) -> None:
    answer = LookupAnswer(len(tiers), tiers=runs_of(tiers))
    assert parse_lookup_answer(lookup_answer_body(answer)) == answer
    assert counts_of(runs_of(tiers)) == {tier.value: tiers.count(tier) for tier in Tier if tier in tiers}


def test_tiers_are_told_where_they_are_asked_for() -> None:
    assert parse_lookup(lookup_body(LookupRequest(("k",), tiers=True))).tiers
    assert "tiers" not in json.loads(lookup_body(LookupRequest(("k",))))
    assert "tiers" not in json.loads(lookup_answer_body(LookupAnswer(3)))


@pytest.mark.parametrize(
    "fields",
    [
        {}, "dram", [["dram", 1]], [["dram", 3]], [["dram", 2], ["disk", 0]], [["dram", 3], ["disk", -1]],
        [["tape", 2]], [["dram", True], ["disk", 1]], [["dram", 1.0], ["disk", 1]], [["dram"]], [["dram", 1, 1]],
        [7], [["dram", 1], ["dram", 1], ["dram", 0]],
    ],
)  # fmt: skip
def test_runs_that_are_not_those_of_two_chunks_are_refused(fields: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_tiers(fields, 2)
