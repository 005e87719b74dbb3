"""Streams of requests for the tests of eviction policies."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import accumulate

from hypothesis import strategies as st

from storage_server.cache.policies.order import Request
from storage_server.cache.policies.policy import EvictionPolicy


def request(text: str, now_s: float = 0.0, shared_count: int = 0) -> Request:
    """A request for chunks of one byte that are called as the letters are."""
    return Request(now_s, tuple(text), (1,) * len(text), shared_count)


def play(policy: EvictionPolicy, *texts: str) -> list[str]:
    """One request a second; the chunks that each of them evicts."""
    return ["".join(map(str, policy.request(request(text, now_s)).evicted)) for now_s, text in enumerate(texts)]


def residents(policy: EvictionPolicy, paths: Sequence[str]) -> str:
    """The chunks of these prefixes that a lookup finds."""
    found = [path[: policy.hit_count(tuple(path))] for path in paths]
    return "".join(sorted(set("".join(found))))


def hit_bytes(policy: EvictionPolicy, requests: Sequence[Request]) -> int:
    """The bytes of all hits when the requests are played."""
    found = 0
    for each in requests:
        found += sum(each.sizes_bytes[: policy.hit_count(each.keys)])
        policy.request(each)
    return found


def reachable(policy: EvictionPolicy) -> list[object]:
    """Everything that the policy keeps in memory, but for numbers."""
    found = dict[int, object]()
    waiting: list[object] = [policy]
    while waiting:
        each = waiting.pop()
        if id(each) not in found and not isinstance(each, (type, float, int)):
            found[id(each)] = each
            waiting += gc.get_referents(each)
    return list(found.values())


def paths(depth_max: int = 5, width: int = 3) -> st.SearchStrategy[tuple[str, ...]]:
    """Keys of the chunks on a way down a tree: a key names all the turns before it, as a hash chain does."""
    turns = st.lists(st.integers(0, width - 1), min_size=1, max_size=depth_max)
    return turns.map(lambda found: tuple(accumulate(map(str, found))))


def streams(count_max: int = 30, size_max: int = 3, depth_max: int = 5) -> st.SearchStrategy[list[Request]]:
    """Requests at growing times. A chunk has the same size wherever it is named."""

    def made(found: tuple[list[tuple[tuple[str, ...], float, int]], list[int]]) -> list[Request]:
        steps, sizes = found
        times = accumulate(gap_s for _, gap_s, _ in steps)
        return [
            Request(
                now_s, keys, tuple(sizes[sum(map(ord, key)) % len(sizes)] for key in keys), min(shared_count, len(keys))
            )
            for now_s, (keys, _, shared_count) in zip(times, steps, strict=True)
        ]

    gaps_s = st.sampled_from((0.0, 0.5, 3.0, 40.0, 4000.0))
    steps = st.lists(st.tuples(paths(depth_max), gaps_s, st.integers(0, 2)), min_size=1, max_size=count_max)
    return st.tuples(steps, st.lists(st.integers(1, size_max), min_size=1, max_size=4)).map(made)
