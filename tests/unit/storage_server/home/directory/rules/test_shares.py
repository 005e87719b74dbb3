"""How much of a journal is waited for."""

from __future__ import annotations

import pytest

from storage_server.home.directory.rules.shares import (
    ALL,
    BYTES_MAX,
    ROWS_MAX,
    ROWS_PER_S,
    WRITTEN,
    Shares,
    WrittenShares,
)


@pytest.mark.parametrize(("rows", "nbytes"), [(ROWS_MAX, 1), (1, BYTES_MAX)])
def test_a_share_is_used_up_by_records_or_bytes_and_comes_again(rows: int, nbytes: int) -> None:
    shares = Shares()
    assert shares.is_waited_for("a", 5.0)
    shares.spend("a", rows, nbytes, 5.0)
    assert not shares.is_waited_for("a", 5.0)
    assert shares.is_waited_for("b", 5.0)
    assert shares.is_waited_for("a", 5.0 + ROWS_MAX / ROWS_PER_S)


def test_a_writer_that_keeps_to_its_rate_is_always_waited_for() -> None:
    shares = Shares()
    for second in range(1000):
        shares.spend("a", int(ROWS_PER_S), 1000, float(second))
        assert shares.is_waited_for("a", float(second))


def test_many_writers_have_a_share_together() -> None:
    """Anybody may make folders of writers."""
    shares, waited_for = Shares(), 0
    for number in range(100):
        shares.spend(str(number), ROWS_MAX // 2, 0, 0.0)
        waited_for += shares.is_waited_for(str(number), 0.0)
    assert waited_for == 2 * ALL - 1


@pytest.mark.parametrize(("rows", "nbytes"), [(1000, 1), (1, BYTES_MAX // 100)])
def test_a_caller_that_has_written_much_waits_and_others_do_not(rows: int, nbytes: int) -> None:
    written, count = WrittenShares(), 0
    while written.may_write("greedy", 5.0):
        written.spend("greedy", rows, nbytes, 5.0)
        count += 1
    assert count <= 100 * WRITTEN
    assert written.may_write("other", 5.0)
    written.spend("other", 2, 100, 5.0)
    assert written.may_write("other", 5.0)
    assert written.may_write("greedy", 5.0 + ROWS_MAX / ROWS_PER_S)


@pytest.mark.parametrize("callers", [1, 2, 7, 100])
def test_all_callers_together_keep_to_what_readers_wait_for(callers: int) -> None:
    """A second of all that they may write, after second, is within a writer's share."""
    written, shares, now_s = WrittenShares(), Shares(), 0.0
    for second in range(60):
        now_s = float(second)
        for step in range(400):
            caller = str(step % callers)
            if written.may_write(caller, now_s):
                written.spend(caller, 1000, 1000, now_s)
                shares.spend("writer", 1000, 1000, now_s)
        assert shares.is_waited_for("writer", now_s)
        assert written.may_write("light", now_s)


def test_a_caller_that_keeps_to_a_third_of_the_rate_is_never_refused() -> None:
    written = WrittenShares()
    for second in range(1000):
        now_s = float(second)
        while written.may_write("greedy", now_s):
            written.spend("greedy", 1000, 1000, now_s)
        assert written.may_write("other", now_s)
        written.spend("other", int(ROWS_PER_S * WRITTEN / 3), 1000, now_s)
