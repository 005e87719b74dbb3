"""The books of a bounded cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descriptors.messages import LEASE_S_MAX
from storage_server.cache.policies.choice import Eviction, policy_of
from storage_server.cache.policies.order import Request
from storage_server.cache.policies.policy import EvictionPolicy
from storage_server.cache.policies.reuse_classes import Use, class_path
from storage_server.cache.policies.reuse_value import ReuseValue
from storage_server.cache.rules import awaited
from storage_server.cache.rules.books import SET_BACK_S, Books
from storage_server.cache.rules.entry import Entry, Name, Victim
from storage_server.cache.rules.hold_budget import HoldBudget
from storage_server.cache.rules.unwritten import LEASE_SPARE_S
from tests.unit.storage_server.cache.policies.streams import reachable

BUCKET = "cached"


def entry(at: float, version: int = 1, nbytes: int = 1, **known: object) -> Entry:
    return Entry(version, nbytes, at, at, **known)  # type: ignore[arg-type]


def made(capacity_bytes: int = 100, eviction: Eviction = Eviction.LRU, ttl_s: float | None = None) -> Books:
    return Books(policy_of(eviction, capacity_bytes), ttl_s)


def filled(text: str, books: Books) -> Books:
    for number, key in enumerate(text):
        books.put((BUCKET, key), entry(float(number)))
    return books


def restore(books: Books, found: Sequence[tuple[Name, Entry]], now: float = 20.0) -> None:
    """As after a restart, those first whose last use is longest ago."""
    books.restore(sorted(found, key=lambda item: item[1].used_at), now)
    books.end_restore()


def left(victims: list[Victim]) -> str:
    return "".join(victim.key for victim in victims)


def test_what_was_used_longest_ago_leaves_first() -> None:
    books = filled("abcd", made())
    books.use(BUCKET, ["a"], 10.0)
    assert left(books.leaving(2, 11.0)) == "bc"
    assert (books.used_bytes, books.count) == (2, 2)
    assert left(books.leaving(0, 11.0)) == "da"


def test_an_object_that_leaves_is_named_with_its_version() -> None:
    """The caller deletes that version, and not one that was put meanwhile."""
    books = made()
    books.put((BUCKET, "a"), entry(1.0, version=7, nbytes=3))
    assert books.leaving(0, 2.0) == [Victim(BUCKET, "a", entry(1.0, version=7, nbytes=3))]


def test_a_copy_of_an_old_object_is_as_new_as_its_coming() -> None:
    """Also after a restart: what is fetched from upstream was stored there long ago."""
    books = filled("ab", made())
    books.put((BUCKET, "old"), entry(-1e6)._replace(used_at=5.0))
    assert [name[1] for name, _ in books.unwritten.changed()] == ["old"]
    assert left(books.leaving(1, 6.0)) == "ab"


def test_what_leaves_while_the_capacity_grows_is_named_by_the_next_leaving() -> None:
    """A dirty object stays beyond the capacity. When it is clean, it may have to leave though the capacity grows."""
    books = made()
    for number, key in enumerate("ab"):
        books.put((BUCKET, key), entry(1.0, version=number, nbytes=10, is_dirty=True))
    assert books.leaving(0, 2.0) == []
    books.put((BUCKET, "a"), entry(1.0, version=0, nbytes=10))
    books.allow(15)
    assert (books.used_bytes, books.count) == (10, 1)
    assert left(books.leaving(15, 3.0)) == "a"


def test_what_is_leased_after_the_capacity_has_grown_stays() -> None:
    books = made()
    books.put((BUCKET, "a"), entry(1.0, nbytes=10, is_dirty=True))
    books.leaving(0, 2.0)
    books.put((BUCKET, "a"), entry(1.0, nbytes=10))
    books.allow(5)
    books.lease(BUCKET, ["a"], 10.0)
    assert books.leaving(5, 3.0) == []
    assert (books.used_bytes, books.count, books.held.nbytes) == (10, 1, 10)


def test_another_version_replaces_the_size() -> None:
    books = filled("a", made())
    books.put((BUCKET, "a"), entry(1.0, version=2, nbytes=30))
    assert (books.used_bytes, books.count) == (30, 1)
    books.remove((BUCKET, "a"))
    books.remove((BUCKET, "a"))
    assert (books.used_bytes, books.count) == (0, 0)


def test_chunks_put_one_by_one_behind_a_lookup_are_a_chain() -> None:
    """An engine looks a prompt up, computes what is missing, and puts it chunk by chunk."""
    books = filled("a", made())
    books.expected.add(BUCKET, ["a", "b", "c"], 1)
    for number, key in enumerate("cb", 5):
        books.put((BUCKET, key), entry(float(number)))
    books.put((BUCKET, "c"), entry(8.0, version=2))
    books.use(BUCKET, ["a", "b", "c"], 9.0)
    assert left(books.leaving(0, 10.0)) == "cba"


def test_only_the_leading_chunks_that_are_there_are_used() -> None:
    books = filled("abc", made())
    books.use(BUCKET, ["a", "x", "b"], 10.0)
    assert left(books.leaving(1, 11.0)) == "bc"


def test_a_chunk_that_is_named_twice_is_used_once() -> None:
    books = filled("ab", made())
    books.use(BUCKET, ["a", "a", "b"], 10.0)
    assert left(books.leaving(0, 11.0)) == "ba"


def test_pinned_objects_stay_and_leave_after_their_pins_end() -> None:
    books = made(2)
    books.put((BUCKET, "a"), entry(0.0, pinned_until=50.0))
    books.put((BUCKET, "b"), entry(1.0, pinned_until=math.inf))
    books.put((BUCKET, "c"), entry(2.0))
    assert left(books.leaving(0, 10.0)) == "c"
    assert left(books.leaving(0, 60.0)) == "a"
    books.put((BUCKET, "b"), entry(1.0))
    assert left(books.leaving(0, 61.0)) == "b"


@pytest.mark.parametrize("eviction", Eviction)
def test_a_pinned_object_comes_in_whatever_its_value(eviction: Eviction) -> None:
    books = made(2, eviction)
    for number in range(20):
        books.put((BUCKET, "hot"), entry(float(number)))
        books.use(BUCKET, ["hot"], float(number))
    books.put((BUCKET, "pinned"), entry(20.0, nbytes=2, pinned_until=math.inf))
    assert "pinned" not in left(books.leaving(2, 21.0))
    assert "pinned" not in left(books.leaving(0, 22.0))


def test_objects_leave_when_their_time_has_come() -> None:
    books = made(ttl_s=10.0)
    books.put((BUCKET, "a"), entry(0.0))
    books.put((BUCKET, "b"), entry(5.0))
    books.put((BUCKET, "a"), entry(7.0, version=2))
    assert left(books.leaving(100, 11.0)) == ""
    assert left(books.leaving(100, 15.0)) == "b"
    assert left(books.leaving(100, 17.0)) == "a"


def test_a_victim_that_could_not_be_deleted_is_put_again() -> None:
    books = filled("ab", made())
    (victim,) = books.leaving(1, 5.0)
    books.put((BUCKET, victim.key), victim.entry)
    assert left(books.leaving(1, 6.0)) == "b"
    assert books.count == 1


@pytest.mark.parametrize("eviction", Eviction)
def test_a_restart_knows_the_order_and_the_parents(eviction: Eviction) -> None:
    """Among what was written down, parents still outlive children, and what was used last stays longest."""
    books = made(eviction=eviction)
    found: list[tuple[Name, Entry]] = [
        ((BUCKET, "old"), entry(1.0)),
        ((BUCKET, "c"), entry(3.0)._replace(used_at=9.0, use_count=2, parent="b")),
        ((BUCKET, "b"), entry(2.0)._replace(used_at=9.0, use_count=2, parent="a")),
        ((BUCKET, "a"), entry(4.0)._replace(used_at=9.0, use_count=2)),
        ((BUCKET, "loop1"), entry(2.0)._replace(used_at=5.0, use_count=2, parent="loop2")),
        ((BUCKET, "loop2"), entry(2.0)._replace(used_at=5.0, use_count=2, parent="loop1")),
    ]
    restore(books, found)
    assert books.unwritten.changed() == []
    order = left([*books.leaving(3, 10.0), *books.leaving(0, 10.0)])
    assert order.index("c") < order.index("b") < order.index("a")
    if eviction is Eviction.LRU:
        assert order.startswith("oldloop")


def test_the_age_of_what_a_restart_found_counts_from_when_it_was_stored() -> None:
    """`ttl_s` holds for it, but not for what has come in its place, nor for what is held."""
    books = made(ttl_s=10.0)
    names = [(BUCKET, key) for key in ("late", "early", "again", "gone", "pinned")]
    stored = (15.0, 11.0, 12.0, 12.0, 12.0)
    found = [(name, entry(at)._replace(used_at=30.0 - at)) for name, at in zip(names, stored, strict=True)]
    found[-1] = found[-1][0], found[-1][1]._replace(pinned_until=40.0)
    restore(books, found)
    books.put((BUCKET, "again"), entry(20.0, version=2))
    books.remove((BUCKET, "gone"))
    assert left(books.leaving(100, 20.0)) == ""
    assert left(books.leaving(100, 21.0)) == "early"
    assert left(books.leaving(100, 25.0)) == "late"
    assert left(books.leaving(100, 30.0)) == "again"
    assert left(books.leaving(100, 50.0)) == "pinned"


def test_what_a_restart_finds_twice_counts_once() -> None:
    books = made()
    restore(books, [((BUCKET, "a"), entry(1.0))])
    restore(books, [((BUCKET, "a"), entry(1.0)), ((BUCKET, "b"), entry(2.0, parent="b"))])
    assert (books.count, books.used_bytes) == (2, 2)
    assert left(books.leaving(0, 10.0)) == "ab"


def test_uses_are_written_down_once() -> None:
    books = filled("ab", made())
    books.use(BUCKET, ["a", "b"], 7.0)
    changed = dict(books.unwritten.changed())
    assert {name[1]: (known.used_at, known.use_count, known.parent) for name, known in changed.items()} == {
        "a": (7.0, 2, None),
        "b": (7.0, 2, "a"),
    }
    assert books.unwritten.changed() == []


Step = tuple[str, str, int, float]
ACTIONS = ("put", "pin", "remove", "use", "expect", "leave")
steps = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.text("abcde", min_size=1, max_size=5), st.integers(0, 12), st.floats(0, 5)),
    max_size=40,
)


@pytest.mark.parametrize("eviction", Eviction)
@given(script=steps)
def test_books_agree_with_the_cache_whatever_happens(eviction: Eviction, script: list[Step]) -> None:
    """What was put and has neither left nor been removed is what the books count, and pinned objects are in it."""
    books, held, pinned = made(12, eviction), dict[str, int](), set[str]()
    now = 0.0
    for number, (what, keys, nbytes, later) in enumerate(script):
        now += later
        key = keys[0]
        if what in ("put", "pin"):
            held[key] = max(1, nbytes)
            pinned.discard(key)
            if what == "pin" and sum(held[name] for name in pinned) + held[key] <= 6:
                pinned.add(key)
            until = math.inf if key in pinned else None
            books.put((BUCKET, key), Entry(number, held[key], now, now, pinned_until=until))
        elif what == "remove":
            held.pop(key, None)
            pinned.discard(key)
            books.remove((BUCKET, key))
        elif what == "use":
            books.use(BUCKET, list(keys), now)
        elif what == "expect":
            books.expected.add(BUCKET, list(keys), nbytes % 3)
        for victim in books.leaving(12 if what != "leave" else nbytes, now):
            assert victim.key not in pinned
            assert held.pop(victim.key) == victim.entry.nbytes
        assert (books.used_bytes, books.count) == (sum(held.values()), len(held))
        assert books.used_bytes <= 12
    for victim in books.leaving(0, now):
        assert victim.key not in pinned
        del held[victim.key]
    assert pinned <= set(held)
    assert books.count == len(held)


def test_leased_chunks_stay_until_the_last_lease_ends() -> None:
    books = filled("abc", made())
    books.lease(BUCKET, ["a", "b", "x"], 20.0)
    books.lease(BUCKET, ["a"], 30.0)
    books.lease(BUCKET, ["a"], 25.0)
    assert left(books.leaving(0, 10.0)) == "c"
    assert left(books.leaving(0, 20.0)) == "b"
    assert dict(books.unwritten.changed())[BUCKET, "a"].leased_until == 30.0 + LEASE_SPARE_S
    assert left(books.leaving(0, 30.0)) == "a"


def test_a_lease_is_written_down_once_and_its_renewals_when_they_matter() -> None:
    """A hot prefix is looked up many times a second, and each lookup renews its leases."""
    books = filled("abc", made())
    books.lease(BUCKET, ["a", "b"], 60.0)
    assert {name[1]: entry.leased_until for name, entry in books.unwritten.leased()} == {"a": 70.0, "b": 70.0}
    for number in range(11):
        books.lease(BUCKET, ["a"], 60.0 + number)
        assert books.unwritten.leased() == []
    books.lease(BUCKET, ["a"], 71.0)
    assert [(name[1], entry.leased_until) for name, entry in books.unwritten.leased()] == [("a", 81.0)]
    books.use(BUCKET, ["a"], 20.0)
    assert [(name[1], entry.leased_until) for name, entry in books.unwritten.changed()] == [("a", 81.0)]
    books.lease(BUCKET, ["c"], 50.0)
    books.unwritten.not_written(name for name, _ in books.unwritten.leased())
    assert [name[1] for name, _ in books.unwritten.leased()] == ["c"]
    books.remove((BUCKET, "c"))
    assert books.unwritten.leased() == []


def test_a_chunk_that_was_to_leave_stays_where_somebody_gets_a_lease_of_it_before() -> None:
    """A lookup had found it: it is in the index until it has left."""
    books = filled("abc", made(2))
    books.lease(BUCKET, ["a"], 20.0)
    assert left(books.leaving(2, 3.0)) == "b"
    assert left(books.leaving(0, 4.0)) == "c"
    assert dict(books.unwritten.leased())[BUCKET, "a"].leased_until == 20.0 + LEASE_SPARE_S
    assert left(books.leaving(0, 21.0)) == "a"


def test_a_chunk_that_somebody_deleted_is_not_brought_back_by_a_lease() -> None:
    books = filled("abc", made(2))
    books.remove((BUCKET, "a"))
    books.lease(BUCKET, ["a"], 20.0)
    assert (books.count, left(books.leaving(0, 3.0))) == (2, "bc")


def test_a_lease_does_not_grow_from_restart_to_restart() -> None:
    books = made()
    restore(books, [((BUCKET, "a"), entry(1.0, leased_until=70.0))])
    assert books.unwritten.leased() == []
    books.use(BUCKET, ["a"], 20.0)
    assert [entry.leased_until for _, entry in books.unwritten.changed()] == [70.0]


def test_an_object_of_a_clock_that_was_ahead_keeps_no_others_from_their_end() -> None:
    books = made(ttl_s=10.0)
    books.leaving(100, 20.0)
    books.put((BUCKET, "ahead"), entry(1e9)._replace(used_at=20.0))
    books.put((BUCKET, "b"), entry(21.0))
    assert left(books.leaving(100, 31.5)) == "aheadb"


def test_an_object_of_a_clock_that_was_ahead_ends_also_after_a_restart() -> None:
    books = made(ttl_s=10.0)
    restore(books, [((BUCKET, "ahead"), entry(1e9)), ((BUCKET, "b"), entry(15.0))], 20.0)
    assert left(books.leaving(100, 25.0)) == "b"
    assert left(books.leaving(100, 30.0)) == "ahead"


def test_a_use_of_a_clock_that_was_ahead_does_not_keep_others_from_aging() -> None:
    """Requests age in the order in which they came: those behind it would wait in memory until that time comes."""
    books = made(eviction=Eviction.REUSE_VALUE)
    restore(books, [((BUCKET, "ahead"), entry(1e9))], 20.0)
    books.put((BUCKET, "a"), entry(21.0))
    counts = []
    for number in range(900):
        books.use(BUCKET, ["a"], 22.0 + number)
        counts.append(len(reachable(books._policy)) if number in (299, 899) else 0)
    assert counts[899] < 1.2 * counts[299]


def test_an_object_that_is_restored_twice_ends_once() -> None:
    """The others that were due at the same time were never deleted."""
    books = made(ttl_s=60.0)
    former, other = ((BUCKET, "x"), entry(10.0)), ((BUCKET, "y"), entry(11.0))
    books.restore([former], 20.0)
    assert left(books.leaving(0, 21.0)) == "x"
    books.restore([former, other], 22.0)
    assert sorted(left(books.leaving(100, 80.0))) == ["x", "y"]


def test_a_lease_of_a_clock_that_was_ahead_ends_within_the_longest_lease() -> None:
    books = made()
    restore(books, [((BUCKET, "a"), entry(1.0, leased_until=1e9))])
    assert [entry.leased_until for _, entry in books.unwritten.leased()] == [20.0 + LEASE_S_MAX + LEASE_SPARE_S]


def test_leases_end_in_their_time_where_the_clock_is_set_back() -> None:
    """They held half of the cache for as long as the clock had gone back, and later leases had no effect."""
    books = filled("abc", made(4))
    books.leaving(4, 4000.0)
    books.lease(BUCKET, ["a", "x"], 4020.0)
    books.follow(400.0)
    books.lease(BUCKET, ["b"], 430.0)
    books.put((BUCKET, "x"), entry(410.0))
    assert left(books.leaving(2, 410.0)) == "c"
    assert sorted(left(books.leaving(0, 421.0))) == ["a", "x"]
    assert left(books.leaving(0, 431.0)) == "b"


def test_leases_stay_where_the_clock_is_a_little_behind_what_it_has_told() -> None:
    books = filled("ab", made())
    books.leaving(4, 100.0)
    books.lease(BUCKET, ["a"], 120.0)
    books.follow(100.0 - SET_BACK_S)
    assert left(books.leaving(0, 119.0)) == "b"


def test_a_lease_is_written_down_anew_where_the_clock_is_set_back() -> None:
    """A restart would believe the end that was written down before."""
    books = filled("a", made())
    books.leaving(4, 4000.0)
    books.lease(BUCKET, ["a"], 4020.0)
    assert [entry.leased_until for _, entry in books.unwritten.leased()] == [4020.0 + LEASE_SPARE_S]
    books.leaving(4, 400.0)
    assert [entry.leased_until for _, entry in books.unwritten.leased()] == [420.0 + LEASE_SPARE_S]


@pytest.mark.parametrize("eviction", Eviction)
def test_a_lease_waits_for_its_chunk(eviction: Eviction) -> None:
    """A chunk that is on its way from upstream must be there when its descriptor comes."""
    books = filled("abc", made(3, eviction))
    books.lease(BUCKET, ["x", "y"], 20.0)
    books.lease(BUCKET, ["x"], 15.0)
    books.put((BUCKET, "x"), entry(10.0))
    assert "x" not in left(books.leaving(0, 11.0))
    assert dict(books.unwritten.changed())[BUCKET, "x"].leased_until == 20.0 + LEASE_SPARE_S
    books.put((BUCKET, "y"), entry(21.0))
    assert sorted(left(books.leaving(0, 21.0))) == ["x", "y"]
    books.put((BUCKET, "x"), entry(22.0))
    assert left(books.leaving(0, 22.0)) == "x"


def test_leases_of_what_never_comes_take_a_bounded_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that waits for everything must not make the leases of another one be forgotten."""
    monkeypatch.setattr(awaited, "AWAITED_MAX", 8)
    books = made()
    books.lease("quiet", ["q"], 100.0)
    for bucket in ("first", "second", "third"):
        books.lease(bucket, [f"{bucket}-{number}" for number in range(100)], 100.0)
    assert sum(map(len, books._awaited._ends.values())) == 8
    assert max(map(len, books._awaited._ends.values())) <= 4
    for name in (("quiet", "q"), ("third", "third-99"), ("third", "third-0")):
        books.put(name, entry(1.0))
    assert left(books.leaving(0, 2.0)) == "third-0"


def test_pins_and_leases_hold_a_part_of_the_cache_only() -> None:
    """One caller must not close the cache to others."""
    books = filled("abcd", made())
    books.held.bytes_max = 2
    books.lease(BUCKET, list("abcd"), 50.0)
    assert left(books.leaving(0, 10.0)) == "cd"
    assert books.refused_count == 2
    books.put((BUCKET, "p"), entry(11.0, pinned_until=math.inf))
    assert left(books.leaving(2, 12.0)) == "p"
    books.remove((BUCKET, "a"))
    books.put((BUCKET, "p"), entry(13.0, pinned_until=math.inf))
    assert left(books.leaving(0, 60.0)) == "b"


def test_caches_of_one_directory_hold_a_part_of_it_together() -> None:
    """Each counted its own holds, so that two caches held all of the directory."""
    all_held = HoldBudget()
    all_held.bytes_max = 3
    one, other = (Books(policy_of(Eviction.LRU, 100), None, all_held) for _ in range(2))
    for books in (one, other):
        books.held.bytes_max = 2
        for key in "abc":
            books.put((BUCKET, key), entry(1.0, pinned_until=60.0))
    assert (left(one.leaving(0, 2.0)), left(other.leaving(0, 2.0))) == ("c", "bc")
    one.remove((BUCKET, "a"))
    other.put((BUCKET, "b"), entry(2.0, pinned_until=60.0))
    assert (left(other.leaving(0, 3.0)), all_held.nbytes) == ("", 3)


def test_dirty_objects_stay_whatever_others_hold_until_they_are_clean() -> None:
    books = filled("ab", made())
    books.held.bytes_max = 1
    books.lease(BUCKET, ["a"], 50.0)
    for key in "de":
        books.put((BUCKET, key), entry(11.0, is_dirty=True))
    assert left(books.leaving(0, 12.0)) == "b"
    books.put((BUCKET, "d"), entry(11.0))
    assert left(books.leaving(0, 13.0)) == "d"
    assert left(books.leaving(0, 55.0)) == "a"
    books.put((BUCKET, "e"), entry(11.0))
    assert left(books.leaving(0, 60.0)) == "e"


def test_a_pin_without_effect_is_known_as_long_as_the_object_has_it() -> None:
    """Whoever deletes a victim ignores such a pin: without one it must look, and with one it must not."""
    books = filled("ab", made())
    books.held.bytes_max = 1
    books.lease(BUCKET, ["a"], 20.0)
    books.put((BUCKET, "b"), entry(1.0, pinned_until=math.inf))
    assert books.refused_count == 1
    books.leaving(100, 20.0)
    books.lease(BUCKET, ["b"], 30.0)
    assert [victim.entry.has_idle_pin for victim in books.leaving(0, 30.0)] == [False, True]
    for pinned_until in (math.inf, None):
        books.held.bytes_max = 0
        books.put((BUCKET, "b"), entry(1.0, pinned_until=pinned_until))
    assert [victim.entry.has_idle_pin for victim in books.leaving(0, 40.0)] == [False]


@pytest.mark.parametrize("hold", ["pin", "lease"])
def test_holds_of_objects_that_become_clean_count_like_new_ones(hold: str) -> None:
    """Objects got their holds while they were dirty, without the limit, and kept the whole cache with them."""
    books = made()
    books.held.bytes_max = 2
    pinned_until = 60.0 if hold == "pin" else None
    for key in "abcd":
        books.put((BUCKET, key), entry(1.0, is_dirty=True, pinned_until=pinned_until))
    if hold == "lease":
        books.lease(BUCKET, list("abcd"), 60.0)
    for key in "abcd":
        books.put((BUCKET, key), entry(1.0, pinned_until=pinned_until))
    assert left(books.leaving(0, 2.0)) == "ab"
    assert books.refused_count == 2
    assert sorted(left(books.leaving(0, 60.0))) == ["c", "d"]


def test_dirty_objects_are_dirty_after_a_restart() -> None:
    books = made()
    restore(books, [((BUCKET, "d"), entry(0.0, is_dirty=True)), ((BUCKET, "a"), entry(1.0))])
    assert left(books.leaving(0, 10.0)) == "a"


def test_flagged_prefixes_leave_last_in_cascade() -> None:
    """All were used once, the flagged one before."""
    books = Books(policy_of(Eviction.CASCADE, 100))
    books.put((BUCKET, "flagged"), entry(1.0, is_shared=True))
    for number in range(6):
        books.put((BUCKET, f"other-{number}"), entry(2.0 + number))
    assert "flagged" not in [victim.key for victim in books.leaving(1, 10.0)]


def test_a_flag_counts_as_a_use_under_several_continuations_in_ours() -> None:
    """What that is worth is learned."""
    order = ReuseValue()
    EvictionPolicy(100, order).request(Request(1.0, ["flagged", "other"], [1, 1], shared_count=1))
    numbers = [order._known[key].run.number for key in ("flagged", "other")]
    uses = [Use(0, 2, 0, 1, 2), Use(1, 2, 0, 0, 0)]
    assert numbers == [order._times.number_of(class_path(use)) for use in uses]


def test_a_lease_outlives_the_pin_and_the_other_way_round() -> None:
    books = made()
    books.put((BUCKET, "a"), entry(0.0, pinned_until=5.0, leased_until=10.0))
    assert left(books.leaving(0, 6.0)) == ""
    books.put((BUCKET, "a"), entry(0.0, pinned_until=20.0))
    assert left(books.leaving(0, 11.0)) == ""
    assert left(books.leaving(0, 20.0)) == "a"


def test_leases_that_are_renewed_without_end_take_no_memory() -> None:
    books = filled("ab", made())
    for number in range(1000):
        books.lease(BUCKET, ["a", "b"], 100.0 + number)
        books.leaving(100, float(number) / 20)
    assert len(books._ends._heap) == 2
    assert left(books.leaving(0, 1098.0)) == ""
    assert len(books._ends._heap) == 2
    assert sorted(left(books.leaving(0, 1099.0))) == ["a", "b"]
    assert (books._ends._heap, books._ends._next) == ([], {})


def test_what_has_left_takes_no_memory() -> None:
    books = made(3, ttl_s=1e6)
    for number in range(500):
        name = (BUCKET, str(number))
        books.put(name, entry(float(number)))
        books.use(BUCKET, [str(number)], float(number))
        books.leaving(3, float(number))
        if number % 2:
            books.remove(name)
    assert max(map(len, (books._births._births, books._entries, books.unwritten._changed))) <= 3


def test_pins_of_what_was_deleted_take_no_memory() -> None:
    books = made()
    for number in range(5000):
        books.put((BUCKET, str(number)), entry(0.0, pinned_until=1e12))
        books.remove((BUCKET, str(number)))
    assert len(books._ends._heap) <= 1002


def test_an_earlier_end_of_a_pin_counts() -> None:
    books = made()
    books.put((BUCKET, "a"), entry(0.0, pinned_until=50.0))
    books.put((BUCKET, "a"), entry(0.0, pinned_until=10.0))
    assert left(books.leaving(0, 9.0)) == ""
    assert left(books.leaving(0, 10.0)) == "a"


def test_a_held_object_does_not_keep_others_from_expiring() -> None:
    books = made(ttl_s=10.0)
    books.put((BUCKET, "held"), entry(0.0, pinned_until=math.inf))
    books.put((BUCKET, "a"), entry(1.0))
    assert left(books.leaving(100, 11.5)) == "a"
    books.put((BUCKET, "held"), entry(0.0))
    assert left(books.leaving(100, 22.0)) == "held"


def test_the_prefixes_that_somebody_has_asked_for_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a kilobyte would take sixteen times as much as those of chunks."""
    monkeypatch.setattr(awaited, "EXPECTED_CHARACTERS_MAX", 1000)
    books = Books(policy_of(Eviction.LRU, 1 << 20))
    for number in range(50):
        books.expected.add("bucket", [f"{number}-{at}-" + "x" * 90 for at in range(4)], 0)
        books.expected.add("bucket", [f"{number}-{at}-" + "x" * 90 for at in range(4)], 0)
        assert books.expected._characters == sum(
            len(key) + len(parent) for (_, key), parent in books.expected._parents.items()
        )
        assert books.expected._characters <= 1000


def test_an_object_that_comes_back_is_deleted_when_its_own_time_has_come() -> None:
    """It is older than all that came since: it does not wait for theirs."""
    books = made(ttl_s=100.0)
    books.put((BUCKET, "old"), entry(0.0))
    books.put((BUCKET, "young"), entry(90.0))
    (victim,) = books.leaving(1, 91.0)
    assert victim.key == "old"
    books.allow(100)
    books.lease(BUCKET, ["old"], 92.0)
    assert books.takes_back(victim)
    assert left(books.leaving(100, 99.0)) == ""
    assert left(books.leaving(100, 101.0)) == "old"
    assert left(books.leaving(100, 190.0)) == "young"
