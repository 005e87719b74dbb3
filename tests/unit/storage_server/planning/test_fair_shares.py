"""Shares of what buckets and callers use together."""

from __future__ import annotations

from storage_server.planning.fair_shares import FairShares


def test_one_bucket_and_one_caller_leave_some_to_others() -> None:
    shares = FairShares(16, 0.5)
    shares.take("a", "x", 6)
    assert [shares.left("a", "x"), shares.left("b", "x"), shares.left("a", "y"), shares.left("b", "y")] == [2, 2, 2, 5]
    shares.take("b", "x", 2)
    assert shares.left("c", "x") == 0
    shares.take("c", "y", 4)
    assert [shares.left("c", "y"), shares.left("d", "z")] == [0, 2]
    shares.give_back("a", "x", 6)
    assert (shares.held, shares.left("c", "x")) == (6, 4)


def test_there_is_no_more_than_all() -> None:
    shares = FairShares(4, 1.0)
    shares.take("a", "x", 3)
    assert shares.left("b", "y") == 1
    shares.give_back("a", "x", 3)
    assert (shares.held, shares.left("b", "y")) == (0, 4)


def test_what_is_given_back_is_forgotten() -> None:
    """A caller may name ever other buckets."""
    shares = FairShares(16, 0.5)
    for bucket in ("a", "b"):
        shares.take(bucket, "x", 2)
    shares.give_back("a", "x", 2)
    assert (dict(shares._of_buckets), dict(shares._of_callers)) == ({"b": 2}, {"x": 2})
    shares.give_back("b", "x", 2)
    assert not shares._of_buckets
    assert not shares._of_callers
