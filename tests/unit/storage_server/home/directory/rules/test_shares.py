"""How much of a journal is waited for."""

from __future__ import annotations

import pytest

from storage_server.home.directory.rules.shares import ALL, BYTES_MAX, ROWS_MAX, ROWS_PER_S, Shares


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
