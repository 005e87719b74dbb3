"""The things that callers have: the caller with most is known at any time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from objectcache.adapters.caller import ByCaller

STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 5)))


@given(STEPS)
def test_a_caller_has_what_it_was_given_and_the_one_with_most_is_known(steps: list[tuple[bool, int, int]]) -> None:
    held: ByCaller[int] = ByCaller()
    expected: dict[int, dict[int, None]] = {}
    for is_added, caller, thing in steps:
        own = expected.setdefault(caller, {})
        own.pop(thing, None)
        if is_added:
            own[thing] = None
            held.add(caller, thing)
        else:
            held.remove(caller, thing)
        assert len(held) == sum(map(len, expected.values()))
        assert held.count(caller) == len(own)
        assert list(held.most()) in [list(each) for each in expected.values()]
        assert len(held.most()) == max(map(len, expected.values()))
    assert sorted(held) == sorted(each for own in expected.values() for each in own)
