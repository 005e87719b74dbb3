"""Bitmaps of lookups."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.errors import CallerError
from descriptors.messages import (
    LookupAnswer,
    LookupRequest,
    lookup_answer_body,
    lookup_body,
    parse_lookup,
    parse_lookup_answer,
)
from descriptors.presence import leading_count, parse_presence, presence_text


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_an_answer_tells_of_each_key(present: list[bool]) -> None:
    answer = LookupAnswer(leading_count(tuple(present)), present=tuple(present))
    assert parse_lookup_answer(lookup_answer_body(answer)) == answer


def test_the_first_key_is_the_lowest_bit() -> None:
    assert presence_text((True, False, True, False)) == "BQ=="


def test_single_keys_are_told_where_they_are_asked_for() -> None:
    assert parse_lookup(lookup_body(LookupRequest(("k",), each=True))).each
    assert "each" not in json.loads(lookup_body(LookupRequest(("k",))))
    assert "present" not in json.loads(lookup_answer_body(LookupAnswer(3)))


def test_what_is_about_a_prefix_is_not_asked_of_single_keys() -> None:
    with pytest.raises(CallerError) as failed:
        parse_lookup(json.dumps({"chunk_keys": ["k"], "each": True, "tiers": True}).encode())
    assert failed.value.field == "each"


@pytest.mark.parametrize("text", [None, 5, "", "====", "BQ", "BQU=", "/w=="])
def test_an_answer_that_is_none_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="present"):
        parse_presence(text, 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"matched": 2, "keys": 4, "present": "BQ=="},
        {"matched": 1, "keys": True, "present": "AQ=="},
        {"matched": 1, "keys": 10**12, "present": "BQ=="},
        {"matched": 1, "keys": 0, "present": ""},
    ],
)
def test_counts_that_do_not_agree_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"keys|matched"):
        parse_lookup_answer(json.dumps(fields).encode())
