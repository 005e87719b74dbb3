"""Our policy learns which chunks come back, and when."""

from __future__ import annotations

import math

from objectcache.kv_codecs.layer import Codec
from storage_server.cache.policies.ladder import Rung
from storage_server.cache.policies.order import Request
from storage_server.cache.policies.policy import EvictionPolicy
from storage_server.cache.policies.recency import LeastRecentlyUsed
from storage_server.cache.policies.reuse_value import ReuseValue
from tests.unit.storage_server.cache.policies.streams import hit_bytes


def asked(now_s: float, *keys: str) -> Request:
    return Request(now_s, keys, (1,) * len(keys))


def conversations(count: int, seconds_apart: float) -> list[Request]:
    """Each request of three chunks is asked for again 30 s later, with two more; between the two come requests of six
    chunks that never come back.
    """
    found = []
    for number in range(count):
        start_s = number * seconds_apart
        first = [f"c{number}.{chunk}" for chunk in range(3)]
        found.append(asked(start_s, *first))
        found.append(asked(start_s + 30, *first, f"c{number}.3", f"c{number}.4"))
        found += [
            asked(start_s + gap_s, *(f"s{number}.{gap_s}.{chunk}" for chunk in range(6))) for gap_s in range(5, 30, 5)
        ]
    return sorted(found, key=lambda each: each.now_s)


def test_requests_of_a_kind_that_never_comes_back_do_not_displace_those_that_do() -> None:
    stream = conversations(200, 40.0)
    lru, ours = EvictionPolicy(12, LeastRecentlyUsed()), EvictionPolicy(12, ReuseValue())
    assert hit_bytes(lru, stream) == 0
    assert hit_bytes(ours, stream) > 0.75 * 3 * 200


def test_a_chunk_of_the_lowest_value_is_not_admitted() -> None:
    """Otherwise it would displace chunks that are worth more, for nothing."""
    policy = EvictionPolicy(12, ReuseValue())
    for each in conversations(200, 40.0):
        policy.request(each)
    policy.request(asked(9000, *(f"kept{chunk}" for chunk in range(3))))
    change = policy.request(asked(9001, *(f"scan{chunk}" for chunk in range(12))))
    assert policy.hit_count([f"kept{chunk}" for chunk in range(3)]) == 3
    assert len(change.admitted) < 12


def test_what_left_still_teaches() -> None:
    """A cache that is too small for any hit learns the same from its ghosts, and forgets no more than it is told to."""
    stream = conversations(60, 40.0)
    remembering, forgetting = EvictionPolicy(2, ReuseValue()), EvictionPolicy(2, ReuseValue(ghost_count_max=0))
    assert hit_bytes(remembering, stream) >= hit_bytes(forgetting, stream)


def test_of_chunks_that_are_used_alike_the_large_ones_leave_first() -> None:
    """The space of one large chunk holds fifteen small ones, each of which saves a read besides its bytes."""
    policy = EvictionPolicy(64 * 16, ReuseValue())
    for number in range(16):
        for name, nbytes in (("large", 60), ("small", 4)):
            policy.request(Request(0.0, [f"{name}-{number}"], [nbytes]))
    policy.resize(64 * 8)
    kept = {name: sum(policy.hit_count([f"{name}-{number}"]) for number in range(16)) for name in ("small", "large")}
    assert kept == {"small": 16, "large": 7}


def test_what_costs_more_to_compute_again_stays_longer() -> None:
    """With a model's costs: the tokens at the end of a long prompt attend to all before them."""
    for order in (("long", "short"), ("short", "long")):
        policy = EvictionPolicy(101, ReuseValue(growth=0.1))
        for name in order:
            policy.request(asked(1.0, *(f"{name}-{chunk}" for chunk in range(100 if name == "long" else 1))))
        assert policy.resize(100) == ("short-0",)


def test_the_depth_of_a_chunk_is_known_behind_its_parent() -> None:
    """Chunks are put one by one: each request names the chunk before, and the new one."""
    policy = EvictionPolicy(102, ReuseValue(growth=0.1))
    for number in range(1, 100):
        policy.request(asked(1.0, f"long-{number - 1}", f"long-{number}"))
    policy.request(asked(1.0, "short", "other"))
    assert policy.resize(100) == ("other", "short")


def test_chunks_with_few_uses_are_all_encoded_before_any_leaves_and_those_with_many_stay_exact() -> None:
    ladder = (Rung(Codec.EXACT, 90, 0), Rung(Codec.KIVI4, 30, round(4 * math.log2(3))))
    policy, hot = EvictionPolicy(10_000, ReuseValue()), [f"hot{number}" for number in range(10)]
    for now_s in range(200):
        for key in hot:
            policy.request(Request(now_s, [key], [90], 0, {key: ladder}))
    for number in range(400):
        policy.request(Request(200.0, [f"cold{number}"], [90], 0, {f"cold{number}": ladder}))
    cold = [policy.resident(f"cold{number}") for number in range(400) if policy.hit_count([f"cold{number}"])]
    assert [policy.resident(key).nbytes for key in hot] == [90] * 10
    assert {each.nbytes for each in cold} == {30}
    assert len(cold) == (10_000 - 900) // 30


def test_where_encoding_costs_little_a_chunk_of_many_uses_is_encoded_too() -> None:
    """A step that costs a use a hundredth of what eviction costs is taken before others leave."""
    for step, nbytes in ((-26, 30), (0, 90)):
        ladder = (Rung(Codec.EXACT, 90, step), Rung(Codec.KIVI4, 30, 6))
        policy = EvictionPolicy(1000, ReuseValue())
        for now_s in range(200):
            policy.request(Request(now_s, ["hot"], [90], 0, {"hot": ladder}))
            policy.request(Request(now_s, [f"scan{now_s}"], [90]))
        assert policy.resident("hot").nbytes == nbytes
