"""What holds for every eviction policy, whatever is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache.kv_codecs.layer import Codec
from storage_server.cache.policies import choice
from storage_server.cache.policies import policy as policy_module
from storage_server.cache.policies.ladder import Rung
from storage_server.cache.policies.order import EvictionOrder, Former, Key, Request, Resident
from storage_server.cache.policies.policy import EvictionPolicy
from storage_server.cache.policies.recency import LeastFrequentlyUsed
from storage_server.cache.policies.reuse_value import ReuseValue
from tests.unit.storage_server.cache.policies.streams import reachable, request, streams

Made = Callable[[int], EvictionPolicy]
ORDERS: dict[str, Callable[[], EvictionOrder]] = {eviction.value: made for eviction, made in choice.ORDERS.items()} | {
    "lfu-forgetful": lambda: LeastFrequentlyUsed(2),
    "reuse-value-forgetful": lambda: ReuseValue(2),
}
every_policy = pytest.mark.parametrize(
    "made",
    [lambda capacity_bytes, order=order: EvictionPolicy(capacity_bytes, order()) for order in ORDERS.values()],
    ids=ORDERS,
)


class Cache:
    """Carries changes out as a tier does, and checks each step."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.sizes_bytes: dict[Key, int] = {}
        self.parents: dict[Key, Key | None] = {}
        self.pinned: set[Key] = set()

    def carry_out(self, asked: Request, policy: EvictionPolicy) -> None:
        before = dict(self.sizes_bytes)
        change = policy.request(asked)
        for key in change.evicted:
            assert key not in self.pinned
            assert key not in {self.parents[each] for each in self.sizes_bytes}, "a child is still there"
            del self.sizes_bytes[key]
        sizes = dict(zip(asked.keys, asked.sizes_bytes, strict=True))
        parents = dict(zip(asked.keys, (None, *asked.keys), strict=False))
        for key in change.admitted:
            assert key not in before
            assert parents[key] is None or parents[key] in self.sizes_bytes, "its parent is not there"
            self.sizes_bytes[key], self.parents[key] = sizes[key], parents[key]
            assert sum(self.sizes_bytes.values()) <= self.capacity_bytes
        assert policy.used_bytes == sum(self.sizes_bytes.values())


@every_policy
@given(stream=streams(), capacity_bytes=st.integers(0, 20), held=st.lists(st.booleans(), min_size=30, max_size=30))
def test_capacity_is_kept_parents_outlive_children_and_pinned_chunks_stay(
    made: Made, stream: list[Request], capacity_bytes: int, held: list[bool]
) -> None:
    """At every moment, since a tier copies chunks while others are read."""
    policy, cache = made(capacity_bytes), Cache(capacity_bytes)
    pins: list[tuple[Key, ...]] = []
    for asked, is_held in zip(stream, held, strict=False):
        cache.carry_out(asked, policy)
        hits = tuple(asked.keys[: policy.hit_count(asked.keys)])
        assert set(hits) <= set(cache.sizes_bytes)
        if is_held:
            policy.pin(hits)
            pins.append(hits)
        elif pins:
            policy.unpin(pins.pop(0))
        cache.pinned = {key for keys in pins for key in keys}
    for keys in pins:
        policy.unpin(keys)


LADDER = (Rung(Codec.EXACT, 8, -3), Rung(Codec.KIVI8, 4, 0), Rung(Codec.KIVI4, 2, 8))
"""That of a chunk of 8 bytes."""


@every_policy
@given(
    stream=streams(),
    capacity_bytes=st.integers(0, 60),
    held=st.lists(st.booleans(), min_size=30, max_size=30),
    ends=st.lists(st.sampled_from(["done", "kept", "refused"]), min_size=30, max_size=30),
)
def test_whatever_becomes_of_encoding_the_room_is_counted_and_pinned_chunks_stay_as_they_are(
    made: Made, stream: list[Request], capacity_bytes: int, held: list[bool], ends: list[str]
) -> None:
    policy = made(capacity_bytes)
    sizes_bytes = dict[Key, int]()
    pins: list[tuple[Key, ...]] = []

    def note(left: Iterable[Key]) -> list[Key]:
        """Note what leaves, and what is encoded, which is returned."""
        pinned = {key for each in pins for key in each}
        assert not pinned & {*policy.encoded, *left}
        for key in left:
            del sizes_bytes[key]
        sizes_bytes.update((key, rung.nbytes) for key, rung in policy.encoded.items())
        assert policy.used_bytes == sum(sizes_bytes.values())
        assert pinned or policy.used_bytes <= capacity_bytes
        encoded = list(policy.encoded)
        policy.encoded.clear()
        return encoded

    for asked, is_held, end in zip(stream, held, ends, strict=False):
        keys = asked.keys
        ladders = {key: LADDER for key in keys if str(key)[-1] != "0"}
        change = policy.request(Request(asked.now_s, keys, [8] * len(keys), asked.shared_count, ladders))
        sizes_bytes.update(dict.fromkeys(change.admitted, 8))
        for key in note(change.evicted):
            if end != "done":
                policy.offer(key, 8, LADDER if end == "kept" else ())
                sizes_bytes[key] = 8
        note(policy.resize(capacity_bytes))
        if is_held:
            policy.pin(hits := tuple(keys[: policy.hit_count(keys)]))
            pins.append(hits)
        elif pins:
            policy.unpin(pins.pop(0))
    while pins:
        policy.unpin(pins.pop())
    for key in policy.resize(0):
        del sizes_bytes[key]
    assert not sizes_bytes


@every_policy
def test_a_parent_is_encoded_while_it_has_children_and_all_are_before_any_leaves(made: Made) -> None:
    policy = made(100)
    policy.request(Request(0.0, "ab", [8, 8], 0, {"a": LADDER, "b": LADDER}))
    assert policy.resize(6) == ()
    assert sorted(rung.nbytes for rung in policy.encoded.values()) == [2, 4]
    assert policy.resize(4) == ()
    assert set(policy.encoded.values()) == {LADDER[2]}
    assert policy.resize(3) == ("b",)
    assert policy.resize(1) == ("a",)


@every_policy
def test_a_pinned_chunk_is_encoded_when_its_last_pin_is_released(made: Made) -> None:
    policy = made(100)
    policy.request(Request(0.0, "ab", [8, 8], 0, {"a": LADDER}))
    policy.pin("ab")
    assert (policy.resize(12), policy.encoded) == ((), {})
    policy.unpin("a")
    assert (policy.resize(12), policy.encoded) == ((), {"a": LADDER[1]})
    policy.unpin("b")
    assert policy.resize(4) == ("b",)


@every_policy
@given(
    stream=streams(),
    capacities=st.lists(st.integers(0, 20), min_size=30, max_size=30),
    removals=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_chunks_may_be_removed_and_the_capacity_may_change(
    made: Made, stream: list[Request], capacities: list[int], removals: list[bool]
) -> None:
    """Clients delete chunks, and other files take space. What the policy says stays true of the cache."""
    policy, sizes_bytes = made(20), dict[Key, int]()
    for asked, capacity_bytes, is_removed in zip(stream, capacities, removals, strict=False):
        change = policy.request(asked)
        for key in change.evicted:
            del sizes_bytes[key]
        sizes = dict(zip(asked.keys, asked.sizes_bytes, strict=True))
        sizes_bytes |= {key: sizes[key] for key in change.admitted}
        if is_removed:
            assert policy.remove(asked.keys[0]) is (asked.keys[0] in sizes_bytes)
            assert not policy.remove(asked.keys[0])
            sizes_bytes.pop(asked.keys[0], None)
        for key in policy.resize(capacity_bytes):
            del sizes_bytes[key]
        assert policy.used_bytes == sum(sizes_bytes.values()) <= capacity_bytes
        assert all(policy.hit_count([key]) == (key in sizes_bytes) for key in asked.keys)
    for key in policy.resize(0):
        del sizes_bytes[key]
    assert not sizes_bytes


@every_policy
def test_what_is_pinned_stays_also_where_it_takes_more_than_the_capacity(made: Made) -> None:
    policy = made(4)
    policy.request(request("ab"))
    policy.pin("ab")
    assert (policy.resize(1), policy.used_bytes, policy.hit_count("ab")) == ((), 2, 2)
    assert policy.request(request("c", 1.0)).admitted == ()
    policy.unpin("ab")
    assert (policy.resize(1), policy.used_bytes) == (("b",), 1)


@every_policy
def test_chunks_that_came_one_by_one_are_joined_when_they_are_asked_for_together(made: Made) -> None:
    """As they come when they are put. Asked for in another order later, none of them stays for ever."""
    policy = made(4)
    for number, key in enumerate("bac"):
        policy.request(request(key, number))
    policy.request(request("abc", 3.0))
    policy.request(request("cba", 4.0))
    left = policy.resize(0)
    assert sorted(left) == ["a", "b", "c"]
    assert left.index("b") < left.index("a")


@every_policy
def test_chunks_that_were_pinned_while_they_were_asked_for_in_another_order_can_leave(made: Made) -> None:
    """A reader decides the order, and holds chunks; it must not make them stay for ever."""
    policy = made(4)
    policy.request(request("ab"))
    policy.pin("ab")
    policy.request(request("ba", 1.0))
    policy.unpin("ab")
    assert sorted(map(str, policy.resize(0))) == ["a", "b"]


@st.composite
def formers(draw: st.DrawFn) -> list[Former]:
    """Residents of before a restart, in order of use. Parents may be gone, and may lead in a circle."""
    count = draw(st.integers(0, 12))
    parents = draw(st.lists(st.none() | st.integers(0, 13), min_size=count, max_size=count))
    times = draw(st.lists(st.sampled_from([1.0, 50.0, 99.0]), min_size=count, max_size=count))
    uses = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    found = [
        Former(key, 1 + key % 3, at, use_count, None if parent == key else parent, is_shared=key % 5 == 0)
        for key, (parent, at, use_count) in enumerate(zip(parents, times, uses, strict=True))
    ]
    return sorted(found, key=lambda former: former.used_at_s)


def leads_to_a_root(former: Former, found: dict[Key, Former]) -> bool:
    seen = set[Key]()
    while former.parent in found and former.key not in seen:
        seen.add(former.key)
        former = found[former.parent]
    return former.key not in seen


@every_policy
@given(found=formers(), at_once=st.integers(1, 5), held=st.sets(st.integers(0, 11)), is_late=st.booleans())
def test_what_was_there_before_a_restart_leaves_children_first(
    made: Made, found: list[Former], at_once: int, held: set[int], is_late: bool
) -> None:
    """In whichever order and portions it comes back; all can leave, also where parents lead in a circle."""
    policy, by_key = made(0), {former.key: former for former in found}
    for start in range(0, len(found), at_once):
        policy.restore(found[start : start + at_once], 100.0)
    policy.end_restore()
    assert policy.used_bytes == sum(former.nbytes for former in found)
    assert policy.hit_count(list(by_key)) == len(found)
    pinned = [key for key in by_key if key in held]
    policy.pin(pinned)
    left = list(policy.resize(0))
    assert not held & set(left)
    if is_late:
        policy.resize(100)
        policy.request(Request(101.0, ["new", *pinned], [1, *(by_key[key].nbytes for key in pinned)]))
    policy.unpin(pinned)
    left += policy.resize(0)
    left = [key for key in left if key in by_key]
    assert sorted(map(str, left)) == sorted(map(str, by_key))
    if not pinned:
        at = {key: index for index, key in enumerate(left)}
        for former in found:
            if former.parent in by_key and leads_to_a_root(former, by_key):
                assert at[former.key] < at[former.parent]


@every_policy
def test_the_oldest_of_before_a_restart_leave_first(made: Made) -> None:
    """This holds among chunks with equally many uses. Later ones may come while earlier ones leave."""
    policy = made(0)
    policy.restore([Former(number, 1, 1.0 + number) for number in range(20)], 100.0)
    left = policy.resize(10)
    policy.restore([Former(number, 1, 1000.0 + number) for number in range(20, 40)], 1100.0)
    policy.end_restore()
    assert set(left) == set(range(10))
    assert set(policy.resize(20)) == set(range(10, 20))


@every_policy
def test_a_chain_too_long_to_look_through_is_not_joined(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for circles must not take the square of the chain."""
    monkeypatch.setattr(policy_module, "DEPTH_LOOKED_AT_MAX", 2)
    policy = made(0)
    chain = [Former(number, 1, 1.0, parent=number - 1 if number else None) for number in range(6)]
    policy.restore([*chain[:4], chain[5], chain[4]], 2.0)
    assert len(policy.resize(0)) == 6


@every_policy
@given(stream=streams(), capacity_bytes=st.integers(0, 20))
def test_the_same_requests_get_the_same_answers(made: Made, stream: list[Request], capacity_bytes: int) -> None:
    """A failure can be played again, and two servers can be compared."""
    first, second = made(capacity_bytes), made(capacity_bytes)
    assert [first.request(asked) for asked in stream] == [second.request(asked) for asked in stream]


@every_policy
def test_everything_stays_where_everything_fits(made: Made) -> None:
    policy = made(5)
    assert [policy.request(request(text, 1.0)).evicted for text in ("abc", "abd", "ae")] == [(), (), ()]
    assert [policy.hit_count(text) for text in ("abc", "abd", "ae")] == [3, 3, 2]


@every_policy
def test_a_prefix_larger_than_the_cache_keeps_its_beginning(made: Made) -> None:
    """Chunks of one request must not evict each other: the leading ones are the hits."""
    policy = made(3)
    for now_s in range(3):
        policy.request(request("abcdef", now_s))
    assert policy.hit_count("abcdef") == 3


@every_policy
def test_a_parked_chunk_leaves_after_its_last_pin(made: Made) -> None:
    policy = made(2)
    policy.request(request("a"))
    policy.pin("a")
    for number, text in enumerate(("b", "c", "d", "c", "d"), 1):
        policy.request(request(text, number))
        assert policy.hit_count("a") == 1
    policy.unpin("a")
    for number in range(6, 40):
        policy.request(request("xy", number))
    assert (policy.hit_count("xy"), policy.hit_count("a")) == (2, 0)


@every_policy
def test_wrong_use_is_refused(made: Made) -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        made(-1)
    policy = made(3)
    policy.request(request("a", 2.0))
    with pytest.raises(ValueError, match="go back"):
        policy.request(request("a", 1.0))
    with pytest.raises(KeyError):
        policy.pin("b")
    with pytest.raises(KeyError):
        policy.unpin("a")


@pytest.mark.parametrize(
    ("keys", "sizes_bytes", "shared_count"), [("aa", (1, 1), 0), ("ab", (1,), 0), ("a", (0,), 0), ("a", (1,), 2)]
)
def test_a_request_that_means_nothing_is_refused(keys: str, sizes_bytes: tuple[int, ...], shared_count: int) -> None:
    with pytest.raises(ValueError, match="chunk"):
        Request(0.0, tuple(keys), sizes_bytes, shared_count)


@given(stream=streams(), capacity_bytes=st.integers(0, 20))
def test_ours_is_never_worse_than_keeping_nothing(stream: list[Request], capacity_bytes: int) -> None:
    """It moves a chunk into the cache at most once for each time that the chunk is asked for and was not there."""
    policy, admitted_count, missed_count = EvictionPolicy(capacity_bytes, ReuseValue()), 0, 0
    for asked in stream:
        hit_count = policy.hit_count(asked.keys)
        assert hit_count >= 0
        missed_count += len(asked.keys) - hit_count
        admitted_count += len(policy.request(asked).admitted)
    assert admitted_count <= missed_count


@every_policy
def test_of_chunks_that_left_a_child_keeps_at_most_its_parent_in_memory(made: Made) -> None:
    """A client that deletes the beginning of a growing prefix would fill the memory with all that it ever put."""
    policy = made(100)
    for number in range(20):
        policy.request(Request(number, (number, number + 1), (1, 1)))
        policy.remove(number)
    assert {each.key for each in reachable(policy) if isinstance(each, Resident)} <= {19, 20}


def use_often(policy: EvictionPolicy, start_s: int, count: int) -> int:
    """Use a prefix again and again, of which the last chunk is deleted and put again each time. Returns the size of
    the policy's memory, in objects.
    """
    for now_s in range(start_s, start_s + count):
        policy.request(request("abcd", now_s))
        policy.remove("d")
    return len(reachable(policy))


@every_policy
def test_memory_does_not_grow_with_the_number_of_uses(made: Made) -> None:
    """A cache in which everything fits evicts nothing, and so must clean up without it."""
    policy = made(100)
    before = use_often(policy, 0, 300)
    assert use_often(policy, 300, 900) < 1.2 * before


def calls_of(made: Made, capacity_bytes: int) -> int:
    """The function calls of the last 200 of 800 requests: 200 conversations, four turns of up to 10 chunks each."""
    policy, count = made(capacity_bytes), 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for number in range(800):
        turn, conversation = divmod(number, 200)
        keys = tuple(f"{conversation}.{chunk}" for chunk in range(4 + 2 * turn))
        asked = Request(float(number), keys, (1,) * len(keys))
        before = sys.getprofile()
        sys.setprofile(note if number >= 600 else before)
        try:
            policy.request(asked)
        finally:
            sys.setprofile(before)
    return count


@pytest.mark.slow
@every_policy
def test_the_cost_of_a_request_does_not_grow_with_the_number_of_residents(made: Made) -> None:
    """A tier has millions of them. The same requests, with 100 residents and with 2,000."""
    assert calls_of(made, 2000) < 2 * calls_of(made, 100)
