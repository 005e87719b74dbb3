"""Models are asked about whole contexts that begin as their texts begin and have the facts that are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from objectcache.calibration.probes import FACTS, beginning_of, cut, encoder_of, probes


class Letters:
    """A tokenizer whose tokens are letters; a text begins with those of `begin`."""

    def __init__(self, begin: tuple[int, ...] = ()) -> None:
        self._begin = list(begin)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, Any]:
        return {"input_ids": (self._begin if add_special_tokens else []) + [ord(letter) for letter in text]}


ENCODE = encoder_of(Letters())
TEXT = ENCODE("All that is gold does not glitter, not all those who wander are lost. " * 12)


def spelled(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize("begin", [(), (2,), (1, 9)])
def test_every_context_begins_as_the_tokenizer_begins_a_text(begin: tuple[int, ...]) -> None:
    """Gemma answers nothing of use without its BOS, and others have none."""
    beginning = beginning_of(Letters(begin))
    assert beginning == begin
    for each in probes([TEXT, TEXT], ENCODE, beginning, 512, 1):
        assert each.context[: len(begin)] == begin
        assert len(each.context) == 512


def test_the_facts_that_are_asked_for_stand_in_the_context() -> None:
    (probe,) = probes([TEXT], ENCODE, (), 512, 1)
    context = spelled(probe.context)
    assert len({fact.answer for fact in probe.facts}) == FACTS
    for fact in probe.facts:
        assert spelled(fact.question + fact.answer).strip() + "." in context
        assert spelled(fact.answer).strip().isdigit()


def test_the_continuation_is_what_follows_in_the_text() -> None:
    (probe,) = probes([TEXT], ENCODE, (), 512, 1)
    start = TEXT[: len(TEXT) - len(probe.continuation)]
    assert start + probe.continuation == TEXT
    assert probe.context[-40:] == start[-40:]


def test_the_same_seed_asks_the_same() -> None:
    assert probes([TEXT], ENCODE, (), 512, 3) == probes([TEXT], ENCODE, (), 512, 3)
    assert probes([TEXT], ENCODE, (), 512, 3) != probes([TEXT], ENCODE, (), 512, 4)


@pytest.mark.parametrize(("length", "context"), [(300, 512), (900, 100)])
def test_texts_and_contexts_that_are_too_short_are_refused(length: int, context: int) -> None:
    with pytest.raises(ValueError, match="for a context of"):
        probes([TEXT[:length]], ENCODE, (), context, 1)


def test_texts_are_spread_and_too_short_ones_refused() -> None:
    assert [list(each) for each in cut(list(range(10)), 2, 3)] == [[0, 1], [4, 5], [8, 9]]
    assert cut([1, 2], 2, 3) == [(1, 2)]
    with pytest.raises(ValueError, match="are needed"):
        cut([1], 2, 3)
