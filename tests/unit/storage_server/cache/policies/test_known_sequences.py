"""Each baseline on short streams whose outcome follows from its published rule."""

from __future__ import annotations

from storage_server.cache.policies.adaptive import AdaptiveReplacement, S3Fifo
from storage_server.cache.policies.policy import Change, EvictionPolicy
from storage_server.cache.policies.recency import Cascade, LeastFrequentlyUsed, LeastRecentlyUsed
from tests.unit.storage_server.cache.policies.streams import play, request, residents


def test_lru_evicts_the_chunk_whose_last_use_is_longest_ago() -> None:
    policy = EvictionPolicy(3, LeastRecentlyUsed())
    assert play(policy, "a", "b", "c", "a", "d", "e") == ["", "", "", "", "b", "c"]
    assert residents(policy, "abcde") == "ade"


def test_lru_evicts_the_deepest_chunks_of_an_old_prefix_first() -> None:
    policy = EvictionPolicy(4, LeastRecentlyUsed())
    assert play(policy, "abc", "xy", "z") == ["", "c", "b"]
    assert policy.request(request("abc", 9)) == Change(admitted=("b", "c"), evicted=("y", "x"))


def test_lfu_evicts_the_chunk_with_the_fewest_uses_and_among_equals_the_oldest() -> None:
    policy = EvictionPolicy(3, LeastFrequentlyUsed())
    assert play(policy, "a", "a", "b", "c", "d", "d", "e") == ["", "", "", "", "b", "", "c"]
    assert residents(policy, "abcde") == "ade"


def test_lfu_remembers_uses_of_chunks_that_left() -> None:
    """b has two uses when it comes back, so c, which has one use, leaves first."""
    remembering, forgetting = EvictionPolicy(2, LeastFrequentlyUsed()), EvictionPolicy(2, LeastFrequentlyUsed(0))
    texts = ("a", "a", "b", "c", "b", "d", "c")
    assert play(remembering, *texts)[3:] == ["b", "c", "", "a"]
    assert residents(remembering, "abcd") == "bc"
    assert play(forgetting, *texts)[3:] == ["b", "c", "b", "d"]


def test_cascade_evicts_what_was_requested_once_before_all_else() -> None:
    policy = EvictionPolicy(3, Cascade())
    assert play(policy, "a", "a", "b", "b", "c", "d", "e") == ["", "", "", "", "", "c", "d"]
    assert residents(policy, "abcde") == "abe"


def test_cascade_keeps_a_prefix_that_its_client_calls_shared() -> None:
    policy = EvictionPolicy(3, Cascade())
    policy.request(request("ab", 0, shared_count=1))
    assert play_on(policy, "c", "d", "e") == ["", "b", "c"]
    assert residents(policy, ["ab", "d", "e"]) == "ade"


def play_on(policy: EvictionPolicy, *texts: str) -> list[str]:
    return ["".join(map(str, policy.request(request(text, 1.0)).evicted)) for text in texts]


def test_arc_protects_what_was_used_twice_from_a_scan() -> None:
    policy = EvictionPolicy(4, AdaptiveReplacement())
    play(policy, "a", "a", "b", "b", "c", "d", "e", "f", "g", "h")
    assert residents(policy, "abcdefgh") == "abgh"


def test_arc_gives_more_room_to_new_chunks_when_one_is_asked_for_soon_after_it_left() -> None:
    """c and d are remembered as chunks that were used once and left too early, so the twice used ones give room."""
    policy = EvictionPolicy(4, AdaptiveReplacement())
    play(policy, "a", "a", "b", "b", "c", "d", "e", "f", "c", "d")
    assert residents(policy, "abcdef") == "bcdf"


def test_s3_fifo_lets_a_scan_pass_through_its_small_queue() -> None:
    policy = EvictionPolicy(10, S3Fifo())
    play(policy, *"aaabbb", *"cdefghijklmnopq")
    assert residents(policy, "ab") == "ab"


def test_s3_fifo_takes_a_chunk_into_the_main_queue_that_comes_back_soon_after_it_left() -> None:
    policy = EvictionPolicy(4, S3Fifo())
    play(policy, *"abcde", "a", *"fghi")
    assert residents(policy, "abcde") == "a"
