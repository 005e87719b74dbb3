"""How long a new request would wait."""

from __future__ import annotations

import pytest

from objectcache.orchestrator.rules.books import EngineBooks, SentRequest
from objectcache.orchestrator.rules.observed_costs import EXACT, FACTOR_MAX, FIXED_S_MAX, PREFILLS_MAX


def sent(request_id: str, compute_s: float, at_s: float, tokens: int = 100) -> SentRequest:
    return SentRequest(request_id, tokens, compute_s, compute_s, at_s)


def test_a_new_prompt_waits_for_the_rest_of_those_before_it() -> None:
    books = EngineBooks(8)
    assert books.load(0.0).queue_s == 0
    books.send(sent("a", 0.4, 0.0))
    books.send(SentRequest("b", 100, 0.2, 0.55, 0.05))
    assert books.load(0.1).queue_s == pytest.approx(0.5)
    assert books.first_byte("a", 0.4) == pytest.approx(0.4)
    assert books.load(0.5).queue_s == pytest.approx(0.1)
    assert books.load(1.3).queue_s == 0.0  # later than predicted, and done at any moment
    assert books.load(9.0).queue_s == pytest.approx(9.0 - 0.4)  # so late that it may need as long again
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


def test_where_no_kv_blocks_are_free_a_new_request_waits_for_as_many_as_it_lacks() -> None:
    """Requests of 100 tokens each that take 4 s give 200 tokens back in 4 s, and one that is older takes its age."""
    books = EngineBooks(8)
    for at in range(3):
        books.send(sent(str(at), 0.0, 0.0))
    books.end("0", 4.0, is_complete=True)
    assert books.room_wait_s(100, 300, 4.0) == 0.0
    assert books.room_wait_s(100, 250, 4.0) == pytest.approx(4.0 * 50 / 200)
    assert books.room_wait_s(100, 250, 12.0) == pytest.approx(12.0 * 50 / 200)
    assert books.room_wait_s(10_000, 250, 4.0) == pytest.approx(4.0)
    assert EngineBooks(8).room_wait_s(10_000, 250, 4.0) == 0.0


def test_an_engine_that_answers_nothing_has_a_queue_whatever_it_says_of_its_costs() -> None:
    """It was taken to be idle, and got every request until all places were with it."""
    books = EngineBooks(900_000)
    for at in range(100):
        books.send(SentRequest(str(at), 10, 0.0, 0.0, at / 100))
    assert books.load(0.99).queue_s == 0.0
    assert books.load(4.0).queue_s == pytest.approx(4.0)
    books.end("0", 4.0, is_complete=False)  # its client has left
    assert books.load(5.0).queue_s == pytest.approx(5.0, abs=0.02)
    for at in range(1, 100):
        books.first_byte(str(at), 5.0)
    assert books.load(5.5).queue_s == 0.0


def test_an_engine_that_answers_one_stream_now_and_then_has_a_queue() -> None:
    """Each first byte ended its silence, so it seemed to have nothing to do, and held all other streams."""
    books = EngineBooks(900_000)
    for at in range(40):
        books.send(SentRequest(str(at), 10, 0.0, 0.0, 0.0))
    for at in range(4):
        books.first_byte(str(at), 0.9 * (at + 1))
    assert books.load(3.6).queue_s == pytest.approx(3.6)


def test_one_late_stream_turns_nobody_away_from_an_engine_that_answers_others() -> None:
    """Its client may have sent what takes long, an image for example."""
    books = EngineBooks(900_000)
    books.send(SentRequest("late", 10, 0.0, 0.0, 0.0))
    for at in range(99):
        books.send(SentRequest(str(at), 10, 0.0, 0.0, at / 10))
        books.first_byte(str(at), at / 10)
    assert books.load(10.0).queue_s == pytest.approx(0.2)


def test_a_long_answer_that_is_no_stream_turns_nobody_away_from_its_engine() -> None:
    """One client could keep the requests of all others from an engine with a single cheap request."""
    books = EngineBooks(8)
    books.send(SentRequest("quick", 10, 0.0, 0.0, 0.0))
    books.first_byte("quick", 0.1)
    books.end("quick", 0.2, is_complete=True)
    books.send(SentRequest("long", 10, 0.0, 0.0, 1.0, is_stream=False))
    assert books.load(100.0).queue_s == 0.0


def test_requests_of_others_are_known_from_the_engines_metrics() -> None:
    books = EngineBooks(8)
    books.send(sent("a", 0.4, 0.0))
    books.correct(running=3, waiting=2, now_s=0.0)
    load = books.load(0.0)
    assert load.active_count == 5
    assert load.queue_s == pytest.approx(0.8)  # the waiting one of others is taken to be like ours
    books.correct(running=1, waiting=0, now_s=0.0)
    assert books.load(0.0).active_count == 1


def test_the_correction_is_a_line_through_what_was_seen_and_late_ones_move_it_little() -> None:
    books = EngineBooks(8)
    works_s = [0.05, 0.1, 0.4, 0.2, 0.3, 0.6]
    for at, work_s in enumerate(works_s):
        assert books.correction == EXACT
        books.send(SentRequest(str(at), 100, work_s, work_s, 10.0 * at))
        books.first_byte(str(at), 10.0 * at + 0.02 + 2 * work_s + (3.0 if at == 2 else 0.0))
    assert books.correction.factor == pytest.approx(2.0, rel=0.05)
    assert books.correction.fixed_s == pytest.approx(0.02, abs=0.02)
    books.send(SentRequest("next", 100, 0.5, 0.5, 100.0))
    assert books.load(100.0).queue_s == pytest.approx(0.5 * books.correction.factor)
    for at in range(PREFILLS_MAX):
        books.send(sent(f"late {at}", 0.1, 200.0 + 100 * at))
        books.first_byte(f"late {at}", 290.0 + 100 * at)
    assert books.correction.factor == FACTOR_MAX
    assert books.correction.fixed_s == FIXED_S_MAX
    assert books.first_byte("0", 1.0) is None


def test_first_bytes_of_one_step_count_as_one_prefill() -> None:
    """Four prompts that wait are computed in one step: the step takes twice as long as their costs say together."""
    books = EngineBooks(8)
    for step in range(8):
        at_s = 10.0 * step
        works_s = [0.1 * (1 + step % 4)] * 4
        for number, work_s in enumerate(works_s):
            books.send(SentRequest(f"{step} {number}", 100, work_s, work_s, at_s))
        for number in range(4):
            books.first_byte(f"{step} {number}", at_s + 2 * sum(works_s) + 0.001 * number)
    assert books.correction.factor == pytest.approx(2.0, rel=0.02)
    assert books.correction.fixed_s == pytest.approx(0.0, abs=0.01)


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
        books.send(SentRequest(str(at), 100, 0.2, 0.2, 0.0, is_stream=False))
    assert books.load(0.1).queue_s == pytest.approx(6 * 0.2 - 0.1)
    assert books.load(0.3).queue_s == 0
    assert books.load(0.3).active_count == 6
    for at in range(6):
        assert books.first_byte(str(at), 50.0, is_stream=False) is None
    assert books.correction == EXACT


def test_loads_that_wait_for_their_turn_are_counted_and_the_one_under_way_is_not() -> None:
    """The store's quote has the one that is under way, and none of those that will begin later."""
    books = EngineBooks(8)
    for at, has_load in enumerate((True, True, False, True)):
        books.send(SentRequest(str(at), 100, 0.2, 0.2, 0.0, has_load=has_load))
    assert books.waiting_loads(0.1) == 2
    books.first_byte("0", 0.2)
    assert books.waiting_loads(0.2) == 1


def test_rates_are_those_of_the_last_arrivals() -> None:
    books = EngineBooks(8)
    for at in range(3):
        books.send(sent(str(at), 0.1, float(at)))
    assert books.load(2.0).arrivals_per_s == 0  # too few to tell
    for at in range(3, 100):
        books.send(sent(str(at), 0.2, float(at)))
        books.end(str(at), at + 0.5, is_complete=True)
    load = books.load(99.5)
    assert load.arrivals_per_s == pytest.approx(32 / 31.5)
    assert load.busy_share == pytest.approx(0.2 * 32 / 31.5)
    assert books.load(1000.0).arrivals_per_s < 0.04
