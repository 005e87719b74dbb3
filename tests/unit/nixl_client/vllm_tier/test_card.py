"""The cards that workers leave for the tier."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_client.connectors.vllm_tier.rules.card import CARD_BYTES, EngineCard, forms_of, parse_card
from nixl_client.connectors.vllm_tier.rules.rows import UsedPages

CARD = EngineCard(
    identity="0" * 64,
    name="tiny",
    platform="cuda",
    hashing="sha256 unset",
    has_adapters=False,
    groups=((UsedPages(0, 128, 128, 4),), (UsedPages(0, 128, 64, 4),)),
    are_whole=(True, False),
)


def test_a_card_is_read_as_it_was_written() -> None:
    assert parse_card(CARD.encode() + bytes(100)) == CARD
    assert parse_card(bytes(CARD_BYTES)) is None


@given(st.binary(max_size=200))
def test_garbage_is_no_card(data: bytes) -> None:
    for text in (data, len(data).to_bytes(4, "little") + data, CARD.encode()[: len(data) + 4]):
        try:
            found = parse_card(text)
        except ValueError:
            continue
        assert found is None


def test_a_card_that_has_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="card"):
        replace(CARD, name="x" * CARD_BYTES).encode()


def test_ranks_have_their_parts_of_a_row_and_incomplete_chunks_are_not_stored() -> None:
    other = replace(CARD, groups=((UsedPages(512, 128, 128, 4),), (UsedPages(512, 128, 64, 4),)))
    full, state = forms_of([CARD, other], 2, 1024, 1)
    assert full is not None
    assert state is not None
    assert (full.nbytes, full.is_front, state.nbytes, state.is_front) == (1024, True, 512, False)
    assert forms_of([CARD, other], 2, 1024, 4)[1] is None
    with pytest.raises(ValueError, match="groups"):
        forms_of([CARD], 3, 1024, 1)
