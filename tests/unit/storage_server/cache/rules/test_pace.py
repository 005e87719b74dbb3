"""The pace of fillers."""

from __future__ import annotations

import pytest

from storage_server.cache.rules.pace import CORES_SHARE, PAUSE_S_MAX, pause_s


@pytest.mark.parametrize("core_count", [1, 2, 4, 7])
def test_a_filler_takes_its_share_of_the_cores(core_count: int) -> None:
    used_s = 0.01
    assert used_s / (used_s + pause_s(used_s, core_count)) == pytest.approx(CORES_SHARE * core_count)


@pytest.mark.parametrize("core_count", [8, 64])
def test_it_rests_for_nothing_where_there_are_many_cores(core_count: int) -> None:
    assert pause_s(0.01, core_count) == 0.0


def test_a_rest_is_bounded() -> None:
    assert pause_s(10.0, 1) == PAUSE_S_MAX
