"""Whole answers, bounded in bytes and time."""

from __future__ import annotations

from orchestrator.response_cache import ResponseCache


def test_answers_are_kept_for_their_time_and_within_the_memory() -> None:
    cache = ResponseCache(8000, 10.0)
    for number in range(20):
        cache.keep(str(number), "text/event-stream", (b"x" * 400, b"y" * 400), float(number))
    assert cache.used_bytes <= 8000
    assert cache.find("0", 19.0) is None
    kept = cache.find("19", 19.0)
    assert kept is not None
    assert kept.pieces == (b"x" * 400, b"y" * 400)
    assert cache.find("19", 29.0) is None
    assert cache.hit_count == 1
    cache.keep("large", "text", (b"z" * 2000,), 0.0)
    assert cache.find("large", 0.0) is None


def test_without_memory_it_is_off() -> None:
    cache = ResponseCache(0, 10.0)
    cache.keep("a", "text", (b"x",), 0.0)
    assert not cache.is_on
    assert cache.find("a", 0.0) is None
