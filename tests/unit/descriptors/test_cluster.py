"""Views of a cluster, and where they place keys."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.cluster import (
    ClusterError,
    Member,
    View,
    ViewId,
    changed_members,
    member_fields,
    member_from_fields,
    parse_view_id,
)
from descriptors.placement import Placement

KEYS = [f"space/{index:064x}" for index in range(4_000)]
BUCKET = "chunks"


def member(name: str, weight: float = 1.0, *, is_draining: bool = False) -> Member:
    return Member(name, f"http://{name}:9100", weight, is_draining)


def placement(*members: Member) -> Placement:
    return Placement(View("kv", 1, members))


def keepers(placed: Placement, keys: list[str] = KEYS, without: tuple[str, ...] = ()) -> list[str]:
    return [placed.members[index].name for index in placed.keepers(BUCKET, keys, without).tolist()]


def test_each_member_is_home_to_its_weight_s_share() -> None:
    found = keepers(placement(member("a"), member("b", 2.0), member("c")))
    shares = {name: found.count(name) / len(KEYS) for name in "abc"}
    assert shares == pytest.approx({"a": 0.25, "b": 0.5, "c": 0.25}, abs=0.03)


def test_a_member_that_joins_or_leaves_moves_its_own_share_alone() -> None:
    before = keepers(placement(member("a"), member("b"), member("c")))
    after = keepers(placement(member("a"), member("b"), member("c"), member("d")))
    moved = {(old, new) for old, new in zip(before, after, strict=True) if old != new}
    assert {new for _, new in moved} == {"d"}
    assert sum(new == "d" for new in after) / len(KEYS) == pytest.approx(0.25, abs=0.03)


def test_a_heavier_member_takes_keys_and_gives_none() -> None:
    before = keepers(placement(member("a"), member("b")))
    after = keepers(placement(member("a"), member("b", 1.5)))
    assert all(new == "b" for old, new in zip(before, after, strict=True) if old != new)


def test_the_next_in_a_key_s_order_stands_in_for_its_home() -> None:
    placed = placement(member("a"), member("b"), member("c"))
    whole, without_b = keepers(placed), keepers(placed, without=("b",))
    for key, keeper, other in zip(KEYS, whole, without_b, strict=True):
        order = [each.name for each in placed.order(BUCKET, key)]
        assert order[0] == keeper
        assert other == (order[1] if keeper == "b" else keeper)
    with pytest.raises(ValueError, match="every member"):
        placed.keepers(BUCKET, KEYS[:1], ("a", "b", "c"))


def test_a_member_that_drains_is_given_nothing_unless_all_drain() -> None:
    assert set(keepers(placement(member("a"), member("b", is_draining=True)))) == {"a"}
    assert set(keepers(placement(member("a", is_draining=True), member("b", is_draining=True)))) == {"a", "b"}


def test_homes_are_the_same_in_every_process_and_of_every_release() -> None:
    """Servers of two releases side by side must agree; so these are written down."""
    placed = placement(member("a"), member("b"), member("c"))
    assert keepers(placed, KEYS[:12]) == GOLDEN
    assert keepers(placed, ["übung", "", "x" * 1024]) == GOLDEN_ODD


GOLDEN = list("acacccabcbcc")
GOLDEN_ODD = list("aac")


def test_buckets_place_their_keys_apart() -> None:
    placed = placement(member("a"), member("b"))
    differ = placed.keepers("one", KEYS) != placed.keepers("two", KEYS)
    assert np.count_nonzero(differ) / len(KEYS) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": "-a"}, "name"),
        ({"name": "a" * 65}, "name"),
        ({"name": 7}, "name"),
        ({"endpoint": "10.0.0.1:9100"}, "endpoint"),
        ({"endpoint": "http://a:1/path"}, "endpoint"),
        ({"endpoint": "http://user@a:1"}, "endpoint"),
        ({"weight": 0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"weight": float("inf")}, "weight"),
        ({"weight": True}, "weight"),
        ({"is_draining": 1}, "is_draining"),
        ({"zone": "x"}, "zone"),
    ],
)
def test_a_bad_member_is_refused_by_field(fields: dict[str, object], problem: str) -> None:
    good = member_fields(member("a"))
    with pytest.raises(ClusterError, match=problem):
        member_from_fields({**good, **fields})


def test_members_travel_as_fields() -> None:
    for each in (member("a"), member("b", 0.5, is_draining=True), Member("c", "unix:/tmp/x.sock")):
        assert member_from_fields(member_fields(each)) == each
    with pytest.raises(ClusterError, match="needs name and endpoint"):
        member_from_fields({"name": "a"})


def test_a_view_has_each_name_once() -> None:
    with pytest.raises(ClusterError, match="one name"):
        View("kv", 1, (member("a"), Member("a", "http://other:1")))
    with pytest.raises(ClusterError, match="number"):
        View("kv", -1)
    with pytest.raises(ClusterError, match="cluster_id"):
        View("k v", 1)


@given(number=st.integers(0, (1 << 63) - 1))
def test_view_ids_travel_as_text(number: int) -> None:
    view_id = ViewId("kv-1.x", number)
    assert parse_view_id(str(view_id)) == view_id


@pytest.mark.parametrize(
    "text", ["", "kv", "kv:", "kv:-1", "kv:1:2", ":1", "kv:99999999999999999999", "kv:1 ", "k v:1"]
)
def test_other_texts_are_no_view_ids(text: str) -> None:
    with pytest.raises(ClusterError):
        parse_view_id(text)


def test_views_of_other_clusters_are_neither_before_nor_after() -> None:
    assert ViewId("kv", 1).is_before(ViewId("kv", 2))
    assert not ViewId("kv", 2).is_before(ViewId("kv", 2))
    assert not ViewId("kv", 1).is_before(ViewId("other", 2))


def test_changed_members_are_those_that_differ() -> None:
    before, after = View("kv", 1, (member("a"), member("b"))), View("kv", 2, (member("a"), member("b", 2.0)))
    assert set(changed_members(before, after)) == {member("b"), member("b", 2.0)}


def test_a_long_prefix_on_many_members_takes_little_memory() -> None:
    """All scores at once would be gigabytes for 65,536 keys and 1,024 members."""
    many = tuple(Member(f"m{index}", f"http://m{index}:1") for index in range(1_024))
    keys = [f"{index:064x}" for index in range(2_048)]
    placement = Placement(View("kv", 1, many))
    placement.keepers(BUCKET, keys[:1])
    tracemalloc.start()
    try:
        whole = placement.keepers(BUCKET, keys)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20
    assert whole[:3].tolist() == [placement.keepers(BUCKET, [key])[0] for key in keys[:3]]
