"""How a client's downlink is shared among the servers that write to it: bounds, and that all end together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_server.delivery.scheduler.downlink_shares import LATE_FRACTION, OVER_MAX, RENEW_S, SHARE_S, DownlinkShares

DOWNLINK = 1e9


def test_one_writer_has_the_whole_downlink() -> None:
    shares = DownlinkShares()
    assert shares.share("agent", DOWNLINK, "a", 1, 1, 0.0) == DOWNLINK
    assert shares.share("other", DOWNLINK, "a", 1, 1, 0.0) == DOWNLINK


def test_shares_are_as_the_bytes_that_are_left() -> None:
    """The example of the module."""
    shares = DownlinkShares()
    shares.share("agent", DOWNLINK, "a", 300_000_000, 300_000_000, 0.0)
    shares.share("agent", DOWNLINK, "b", 100_000_000, 100_000_000, 0.0)
    assert shares.share("agent", DOWNLINK, "a", 300_000_000, 300_000_000, 0.1) == pytest.approx(0.75 * DOWNLINK)
    assert shares.share("agent", DOWNLINK, "b", 100_000_000, 100_000_000, 0.1) == pytest.approx(0.25 * DOWNLINK)


def test_a_writer_that_asks_first_gets_no_more_than_its_part() -> None:
    shares = DownlinkShares()
    assert shares.share("agent", DOWNLINK, "a", 300, 400, 0.0) == pytest.approx(0.75 * DOWNLINK)
    assert shares.share("agent", DOWNLINK, "b", 100, 400, 0.0) == pytest.approx(0.25 * DOWNLINK)


def test_a_writer_that_comes_late_gets_a_part_at_once() -> None:
    shares = DownlinkShares()
    shares.share("agent", DOWNLINK, "a", 1000, 1000, 0.0)
    assert shares.share("agent", DOWNLINK, "b", 1000, 1000, 0.0) == LATE_FRACTION * DOWNLINK / 2


def test_a_share_ends_when_nobody_asks_for_it_again_and_when_it_is_given_back() -> None:
    shares = DownlinkShares()
    for gone in ("killed", "done"):
        shares.share("agent", DOWNLINK, gone, 1000, 1000, 0.0)
    assert shares.share("agent", DOWNLINK, "done", 0, 0, 0.1) == 0.0
    assert shares.share("agent", DOWNLINK, "a", 1000, 1000, SHARE_S - 0.01) < DOWNLINK
    assert shares.share("agent", DOWNLINK, "a", 1000, 1000, SHARE_S + 0.01) == DOWNLINK
    assert shares.share("agent", DOWNLINK, "a", 0, 0, SHARE_S + 0.02) == 0.0
    assert len(shares) == 0


def test_an_agent_that_is_gone_is_forgotten() -> None:
    shares = DownlinkShares()
    shares.share("agent", DOWNLINK, "a", 1000, 1000, 0.0)
    shares.forget("agent")
    shares.forget("agent")
    assert len(shares) == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 63), st.integers(0, 10**12), st.integers(0, 10**12), st.floats(0.0, 0.3)),
        min_size=1,
        max_size=120,
    )
)
def test_all_shares_together_are_bounded_and_nobody_who_has_bytes_gets_nothing(
    asks: list[tuple[int, int, int, float]],
) -> None:
    shares, now_s, held = DownlinkShares(), 0.0, dict[int, tuple[float, float]]()
    for writer, left_bytes, more_bytes, pause_s in asks:
        now_s += pause_s
        share = shares.share("agent", DOWNLINK, str(writer), left_bytes, left_bytes + more_bytes, now_s)
        held[writer] = share, now_s + SHARE_S
        assert (share > 0) == (left_bytes > 0)
        together = sum(each for each, until_s in held.values() if until_s > now_s)
        assert together <= (OVER_MAX + 0.05) * DOWNLINK


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(10**6, 10**9), min_size=1))
def test_servers_that_keep_asking_end_together_as_soon_as_the_downlink_allows(sizes: dict[str, int]) -> None:
    """Played: each server sends at its share, and asks every RENEW_S."""
    shares, left, now_s, ended = DownlinkShares(), {name: float(size) for name, size in sizes.items()}, 0.0, {}
    whole = sum(sizes.values())
    while left:
        rates = {
            name: shares.share(
                "agent", DOWNLINK, name, max(1, round(nbytes)), round(nbytes * whole / sizes[name]), now_s
            )
            for name, nbytes in left.items()
        }
        for name, rate in rates.items():
            if left[name] <= rate * RENEW_S:
                ended[name] = now_s + left.pop(name) / rate
                shares.share("agent", DOWNLINK, name, 0, 0, now_s)
            else:
                left[name] -= rate * RENEW_S
        now_s += RENEW_S
    assert max(ended.values()) <= whole / DOWNLINK * 1.001 + RENEW_S / 10
