"""How long a new request would wait."""

from __future__ import annotations

import pytest

from orchestrator.rules.books import BIAS_MAX, EngineBooks, Sent


def sent(request_id: str, compute_s: float, at_s: float, tokens: int = 100) -> Sent:
    return Sent(request_id, tokens, compute_s, compute_s, at_s)


def test_a_new_prompt_waits_for_the_rest_of_those_before_it() -> None:
    books = EngineBooks(8)
    assert books.load(0.0).queue_s == 0
    books.send(sent("a", 0.4, 0.0))
    books.send(sent("b", 0.2, 0.05))
    assert books.load(0.1).queue_s == pytest.approx(0.5)
    assert books.first_byte("a", 0.4) == pytest.approx(0.4)
    assert books.load(0.5).queue_s == pytest.approx(0.1)
    assert books.load(9.0).queue_s == 0.0  # later than predicted, and done at any moment
    assert books.load(0.5).tokens == 200


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_request_counts_until_its_end_however_it_ends(is_complete: bool) -> None:
    books = EngineBooks(8)
    books.send(sent("a", 0.4, 0.0))
    books.end("a", 0.1, is_complete=is_complete)
    books.end("a", 0.2, is_complete=is_complete)
    assert books.load(0.2).active_count == 0
    assert books.load(0.2).queue_s == 0


def test_where_all_places_are_taken_a_new_request_waits_for_one() -> None:
    books = EngineBooks(2)
    for at in range(4):
        books.send(sent(str(at), 0.0, 0.0))
        books.first_byte(str(at), 0.0)
    books.end("0", 4.0, is_complete=True)
    assert books.load(4.0).queue_s == pytest.approx(2 * 4.0 / 2)


def test_requests_of_others_are_known_from_the_engines_metrics() -> None:
    books = EngineBooks(8)
    books.send(sent("a", 0.4, 0.0))
    books.correct(running=3, waiting=2, now_s=0.0)
    load = books.load(0.0)
    assert load.active_count == 5
    assert load.queue_s == pytest.approx(0.8)  # the waiting one of others is taken to be like ours
    books.correct(running=1, waiting=0, now_s=0.0)
    assert books.load(0.0).active_count == 1


def test_the_bias_is_the_median_of_what_was_seen_within_bounds() -> None:
    books = EngineBooks(8)
    for at, ttft_s in enumerate([0.2, 0.2, 0.2, 9.0, 0.2]):
        books.send(sent(str(at), 0.1, 0.0))
        assert books.bias == 1.0
        books.first_byte(str(at), ttft_s)
    assert books.bias == pytest.approx(2.0)
    for at in range(10):
        books.send(sent(f"late {at}", 0.1, 0.0))
        books.first_byte(f"late {at}", 90.0)
    assert books.bias == BIAS_MAX
    assert books.first_byte("0", 1.0) is None


def test_requests_of_others_wait_before_ours_even_where_we_have_none() -> None:
    books = EngineBooks(64)
    books.send(sent("a", 0.5, 0.0))
    books.first_byte("a", 0.5)
    books.end("a", 0.6, is_complete=True)
    books.correct(running=1, waiting=10, now_s=0.7)
    assert books.load(0.7).queue_s > 0.5


def test_a_request_that_is_not_streamed_waits_as_long_as_predicted_and_says_nothing_of_predictions() -> None:
    """Its first byte comes with its last one."""
    books = EngineBooks(8)
    for at in range(6):
        books.send(Sent(str(at), 100, 0.2, 0.2, 0.0, is_stream=False))
    assert books.load(0.1).queue_s == pytest.approx(6 * 0.2 - 0.1)
    assert books.load(0.3).queue_s == 0
    assert books.load(0.3).active_count == 6
    for at in range(6):
        assert books.first_byte(str(at), 50.0, is_stream=False) is None
    assert books.bias == 1.0


def test_loads_that_wait_for_their_turn_are_counted_and_the_one_under_way_is_not() -> None:
    """The store's quote has the one that is under way, and none of those that will begin later."""
    books = EngineBooks(8)
    for at, has_load in enumerate((True, True, False, True)):
        books.send(Sent(str(at), 100, 0.2, 0.2, 0.0, has_load=has_load))
    assert books.waiting_loads(0.1) == 2
    books.first_byte("0", 0.2)
    assert books.waiting_loads(0.2) == 1
