"""How fast a client reads."""

from __future__ import annotations

import pytest

from descriptors.storage_api import Patience
from objectcache.adapters.reading_pace import ReadingPace


@pytest.mark.parametrize(
    ("least", "looks", "slow"),
    [
        (0.0, [(5.0, 0), (4.9, 1)], [False, False]),
        (0.0, [(5.0, 0), (5.0, 0)], [False, True]),
        (100.0, [(10.0, 999)], [True]),
        (100.0, [(10.0, 1000)], [False]),
        (100.0, [(10.0, 5000), (10.0, 0)], [False, True]),
    ],
)
def test_a_pace_counts_what_was_taken_while_it_was_waited_for(
    least: float, looks: list[tuple[float, int]], slow: list[bool]
) -> None:
    pace = ReadingPace(Patience(10.0, least))
    assert [pace.is_too_slow(*look) for look in looks] == slow
