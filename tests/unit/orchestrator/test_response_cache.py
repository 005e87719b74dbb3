"""Whole answers, bounded in bytes and time."""

from __future__ import annotations

from objectcache.orchestrator.response_cache import (
    ANSWER_BYTES,
    ANSWER_BYTES_MAX,
    PIECE_BYTES,
    REPLAYED_BYTES,
    Collected,
    ResponseCache,
    joined,
)


def keep(cache: ResponseCache, key: str, pieces: tuple[bytes, ...], now_s: float) -> None:
    answer = Collected(cache)
    for piece in pieces:
        answer.add(piece)
    cache.keep(key, "text/event-stream", answer, now_s)
    answer.drop()


def test_answers_are_kept_for_their_time_and_within_the_memory() -> None:
    cache = ResponseCache(80_000, 10.0)
    for number in range(200):
        keep(cache, str(number), (b"x" * 400, b"y" * 400), number / 10)
    assert cache.used_bytes <= 80_000
    assert cache.find("0", 19.0) is None
    kept = cache.find("199", 20.0)
    assert kept is not None
    assert kept.pieces == (b"x" * 400 + b"y" * 400,)
    assert cache.find("199", 29.9) is None
    assert cache.hit_count == 1
    keep(cache, "large", (b"z" * 20_000,), 0.0)
    assert cache.find("large", 0.0) is None


def test_without_memory_it_is_off() -> None:
    cache = ResponseCache(0, 10.0)
    keep(cache, "a", (b"x",), 0.0)
    assert not cache.is_on
    assert cache.find("a", 0.0) is None


def test_small_pieces_count_with_what_python_takes_for_them() -> None:
    """A stream of single bytes took sixty times what the cache counted."""
    cache = ResponseCache(80_000, 10.0)
    keep(cache, "a", (b"x",) * 100, 0.0)
    assert cache.used_bytes >= 100 * (1 + PIECE_BYTES) + ANSWER_BYTES
    keep(cache, "b", (b"x",) * 1000, 0.0)
    assert cache.find("b", 0.0) is None


def test_answers_under_way_together_take_no_more_than_the_cache() -> None:
    """Each held an eighth of the cache, however many there were."""
    cache = ResponseCache(80_000, 10.0)
    under_way = [Collected(cache) for _ in range(100)]
    for answer in under_way:
        answer.add(b"x" * 9_000)
    assert cache.collecting_bytes <= 80_000
    assert sum(answer.is_whole for answer in under_way) == 80_000 // (9_000 + PIECE_BYTES)
    for answer in under_way:
        answer.drop()
        answer.drop()
    assert cache.collecting_bytes == 0


def test_an_answer_is_replayed_in_few_pieces() -> None:
    """A client chooses how many tokens it has, and each comes as a piece."""
    pieces = [b"x" * 150] * 2000
    found = joined(pieces)
    assert b"".join(found) == b"".join(pieces)
    assert len(found) <= 300_000 // REPLAYED_BYTES + 1


def test_no_answer_is_looked_through_that_is_very_large() -> None:
    assert ResponseCache(1 << 40, 10.0).answer_bytes_max == ANSWER_BYTES_MAX
