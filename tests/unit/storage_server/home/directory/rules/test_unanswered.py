"""For how long journals that do not answer are waited for."""

from __future__ import annotations

import errno

import pytest

from storage_server.home.directory.rules.unanswered import CLAIM, REGAINED, WAITED_S, UnansweredJournals


@pytest.fixture
def journals() -> UnansweredJournals:
    return UnansweredJournals()


def test_a_journal_that_does_not_answer_is_waited_for_for_a_while(journals: UnansweredJournals) -> None:
    journals.note("a", errno.EIO, 0.0)
    journals.note("a", errno.EIO, WAITED_S / 2)
    assert journals.waited_for(WAITED_S - 1) == "a"
    assert journals.waited_for(WAITED_S) is None


def test_a_read_that_hangs_is_waited_for_from_its_begin_on(journals: UnansweredJournals) -> None:
    journals.note("a", errno.ETIMEDOUT, 8.0, since_s=1.0)
    assert journals.waited_for(WAITED_S) == "a"
    assert journals.waited_for(1.0 + WAITED_S) is None


def test_a_journal_that_fails_and_answers_in_turns_is_waited_for_no_longer_than_one_that_fails(
    journals: UnansweredJournals,
) -> None:
    """Its time would begin anew with each answer, and callers would wait for it for ever."""
    waited_s, hangs_s = 0.0, 9.0
    for turn in range(100):
        begun_s = 12.0 * turn
        journals.note("a", errno.ETIMEDOUT, begun_s)
        waited_s += hangs_s if journals.waited_for(begun_s + hangs_s - 1) == "a" else 0.0
        journals.note("a", 0, begun_s + hangs_s)
    assert waited_s <= WAITED_S + 1200 * REGAINED


def test_a_journal_has_a_claim_again_when_it_has_answered_for_long(journals: UnansweredJournals) -> None:
    assert journals.has_claim("a", 0.0)
    journals.note("a", errno.EIO, 0.0)
    journals.note("a", 0, 2 * WAITED_S)
    regained_s = 2 * WAITED_S + CLAIM * WAITED_S / REGAINED
    assert [journals.has_claim("a", now_s) for now_s in (2 * WAITED_S, regained_s - 1, regained_s)] == [
        False,
        False,
        True,
    ]


def test_a_short_failure_costs_no_claim(journals: UnansweredJournals) -> None:
    journals.note("a", errno.EIO, 0.0)
    journals.note("a", 0, CLAIM * WAITED_S)
    assert journals.has_claim("a", CLAIM * WAITED_S)


def test_nothing_is_kept_of_folders_that_are_gone(journals: UnansweredJournals) -> None:
    for writer in ("a", "b"):
        journals.note(writer, errno.EIO, 0.0)
        journals.note(writer, 0, 2 * WAITED_S)
    journals.keep({"b"})
    assert [journals.has_claim(writer, 2 * WAITED_S) for writer in ("a", "b")] == [True, False]
