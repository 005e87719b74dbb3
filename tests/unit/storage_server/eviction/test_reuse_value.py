"""Our policy learns which chunks come back, and when."""

from __future__ import annotations

from storage_server.eviction.policy import Request
from storage_server.eviction.recency import LeastRecentlyUsed
from storage_server.eviction.reuse_value import ReuseValue
from tests.unit.storage_server.eviction.streams import hit_bytes


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
    lru, ours = LeastRecentlyUsed(12), ReuseValue(12)
    assert hit_bytes(lru, stream) == 0
    assert hit_bytes(ours, stream) > 0.75 * 3 * 200


def test_a_chunk_of_the_lowest_value_is_not_admitted() -> None:
    """Otherwise it would displace chunks that are worth more, for nothing."""
    policy = ReuseValue(12)
    for each in conversations(200, 40.0):
        policy.request(each)
    policy.request(asked(9000, *(f"kept{chunk}" for chunk in range(3))))
    change = policy.request(asked(9001, *(f"scan{chunk}" for chunk in range(12))))
    assert policy.hit_count([f"kept{chunk}" for chunk in range(3)]) == 3
    assert len(change.admitted) < 12


def test_what_left_still_teaches() -> None:
    """A cache that is too small for any hit learns the same from its ghosts, and forgets no more than it is told to."""
    stream = conversations(60, 40.0)
    remembering, forgetting = ReuseValue(2), ReuseValue(2, ghost_count_max=0)
    assert hit_bytes(remembering, stream) >= hit_bytes(forgetting, stream)
