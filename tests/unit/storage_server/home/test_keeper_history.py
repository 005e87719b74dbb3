"""Under which placements a key must have been a server's own, for its copy to be trusted."""

from __future__ import annotations

from descriptors.cluster import Member, View
from descriptors.placement import Placement
from storage_server.home.rules.keeper_history import FORMER_MAX, KeeperHistory

SETTLE_S = 15.0


def placed(*weights: float) -> Placement:
    members = tuple(Member(f"m{at}", f"http://m{at}:1", weight) for at, weight in enumerate(weights))
    return Placement(View("kv", 1, members))


def test_nothing_is_trusted_until_a_comparison_began_long_enough_after_the_first_placement() -> None:
    history = KeeperHistory(SETTLE_S)
    history.change(placed(1), 100.0)
    assert not history.compared(114.0)
    assert history.trusted == ()
    assert history.compared(115.0)
    assert len(history.trusted) == 1


def test_members_that_change_all_the_time_do_not_keep_a_cache_from_being_trusted() -> None:
    """A member that crashes again and again changes the members every few seconds. The placements stay few."""
    history, now_s = KeeperHistory(SETTLE_S), 0.0
    one, other = placed(1, 1), placed(1, 1, 1)
    history.change(one, now_s)
    assert history.compared(SETTLE_S)
    for at in range(1, 1_000):
        now_s = SETTLE_S + 5.0 * at
        history.change((one, other)[at % 2], now_s)
        assert 1 < len(history.trusted) <= 3
        if at % 3 == 0:
            assert not history.compared(now_s)
    assert history.settled_s == now_s + SETTLE_S
    assert history.compared(history.settled_s)
    assert len(history.trusted) == 1


def test_more_placements_than_count_end_all_trust_until_they_are_settled() -> None:
    """Each call asks each placement, so anybody who may write to etcd would choose what a call costs."""
    history = KeeperHistory(SETTLE_S)
    history.change(placed(1), 0.0)
    assert history.compared(SETTLE_S)
    for at in range(1_000):
        history.change(placed(1, 2.0 + at), 20.0 + at)
        assert len(history.trusted) <= FORMER_MAX + 1
    assert history.trusted == ()
    assert not history.compared(1_020.0)  # a part of the last fifteen seconds is not known
    assert history.compared(1_019.0 + SETTLE_S)
    assert len(history.trusted) == 1


def test_the_same_members_told_again_are_no_other_placement() -> None:
    history = KeeperHistory(SETTLE_S)
    history.change(placed(1, 1), 0.0)
    assert history.compared(SETTLE_S)
    history.change(placed(1, 1), 20.0)
    assert len(history.trusted) == 1


def test_what_was_lost_is_trusted_after_a_comparison_that_began_later() -> None:
    history = KeeperHistory(SETTLE_S)
    history.change(placed(1), 0.0)
    assert history.compared(SETTLE_S)
    history.lose(50.0)
    assert history.trusted == ()
    assert not history.compared(50.0)
    assert history.compared(65.0)
    history.change(None, 70.0)
    assert history.trusted == ()
    assert not history.compared(90.0)
