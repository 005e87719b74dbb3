"""Bodies that come too slowly, by a played clock."""

from __future__ import annotations

import pytest

from objectcache.adapters.slow_bodies import BODY_WINDOW_S, LEAST_BODY_BYTES_PER_S, LOOK_PAUSE_S, BodyWatch, SlowBodies


def watch() -> BodyWatch:
    made = BodyWatch()
    made.begun(100.0)
    return made


def test_a_body_is_slow_after_a_whole_window_below_the_least_rate() -> None:
    made = watch()
    assert made.slow_rate(1, 106.0, is_awaited=True) is None
    assert made.slow_rate(6, 112.0, is_awaited=True) == 0.5
    assert made.slow_rate(7, 118.0, is_awaited=True) == 0.5
    assert made.slow_rate(30, 124.0, is_awaited=True) == 2.0


@pytest.mark.parametrize("step_s", [1.0, 6.0, 60.0])
def test_the_least_rate_is_fast_enough_however_often_one_looks(step_s: float) -> None:
    made = watch()
    for index in range(1, 60):
        elapsed_s = step_s * index
        assert made.slow_rate(int(LEAST_BODY_BYTES_PER_S * elapsed_s), 100.0 + elapsed_s, is_awaited=True) is None


def test_a_megabyte_at_first_does_not_pay_for_hours() -> None:
    made = watch()
    assert made.slow_rate(1 << 20, 106.0, is_awaited=True) is None
    assert made.slow_rate((1 << 20) + 12, 118.0, is_awaited=True) == 1.0


def test_the_time_in_which_the_server_does_not_read_does_not_count() -> None:
    made = watch()
    assert made.slow_rate(0, 200.0, is_awaited=False) is None
    assert made.slow_rate(0, 200.0 + BODY_WINDOW_S - 1, is_awaited=True) is None
    assert made.slow_rate(0, 200.0 + BODY_WINDOW_S, is_awaited=True) == 0.0


def test_a_slow_body_that_hurries_is_slow_no_more_at_once() -> None:
    made = watch()
    assert made.slow_rate(0, 112.0, is_awaited=True) == 0.0
    assert made.slow_rate(int(BODY_WINDOW_S * LEAST_BODY_BYTES_PER_S), 113.0, is_awaited=True) is None


def test_the_slowest_end_first_and_a_batch_at_once() -> None:
    rates: dict[str, float | None] = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 4.0}
    slow: SlowBodies[str] = SlowBodies(128)
    for name, rate in rates.items():
        slow.note(name, rate)
    assert slow.slowest(0.0, rates.get) == ["b", "c"]
    assert (slow.count, slow.ending_count) == (2, 2)
    slow.note("b", 1.0)
    assert slow.count == 2, "it ends already"
    slow.closed("b")
    assert slow.ending_count == 1
    rates["a"] = None
    assert slow.slowest(0.0, rates.get) == ["d"], "a hurries now"
    slow.note("a", 1.0)


def test_nobody_looks_for_each_newcomer() -> None:
    """A flood of newcomers would otherwise have every connection looked at for each of them."""
    slow: SlowBodies[str] = SlowBodies(128)
    assert slow.slowest(0.0, lambda _: 1.0) == []
    slow.note("a", 1.0)
    assert slow.slowest(LOOK_PAUSE_S / 2, lambda _: 1.0) == []
    assert slow.slowest(LOOK_PAUSE_S, lambda _: 1.0) == ["a"]
