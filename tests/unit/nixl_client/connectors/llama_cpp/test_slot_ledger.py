"""The slot that a request gets."""

from __future__ import annotations

import numpy as np

from nixl_client.connectors.llama_cpp.rules.slot_ledger import ChosenSlot, SlotLedger, common_tokens


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def test_the_slot_with_the_longest_beginning_of_the_prompt_is_taken() -> None:
    ledger = SlotLedger(3)
    for _ in range(3):
        assert ledger.choose(tokens(9)) is not None
    assert ledger.choose(tokens(1)) is None
    ledger.release(0, tokens(1, 2, 3))
    ledger.release(1, tokens(1, 2, 4, 5))
    ledger.release(2, tokens(7))
    assert ledger.choose(tokens(1, 2, 4, 9)) == ChosenSlot(1, 3)
    assert ledger.choose(tokens(1, 2, 4, 9)) == ChosenSlot(0, 2)


def test_of_equal_slots_the_one_used_longest_ago_is_taken() -> None:
    """So that what others may come back to stays."""
    ledger = SlotLedger(2)
    for value in (1, 2):
        slot = ledger.choose(tokens(value))
        assert slot is not None
        ledger.release(slot.index, tokens(value, value))
    assert ledger.choose(tokens(3)) == ChosenSlot(0, 0)


def test_slots_that_others_have_used_hold_nothing_that_is_known() -> None:
    ledger = SlotLedger(1)
    ledger.choose(tokens(1))
    ledger.release(0, tokens(1, 2))
    ledger.forget()
    assert ledger.choose(tokens(1, 2)) == ChosenSlot(0, 0)


def test_common_tokens() -> None:
    assert common_tokens(tokens(), tokens(1)) == 0
    assert common_tokens(tokens(1, 2), tokens(1, 2, 3)) == 2
    assert common_tokens(tokens(1, 3), tokens(1, 2, 3)) == 1
