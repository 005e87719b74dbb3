"""Which dirty chunk is uploaded next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from storage_server.home.rules.upload_turns import Name, UploadTurns


def made(names: str, each_max: int = 4) -> UploadTurns:
    """Turns with names as `a1 a2 b1`: a bucket and a key."""
    turns = UploadTurns(each_max, 0.5, 2.0)
    for name in names.split():
        turns.add((name[0], name[1:]))
    return turns


def taken(turns: UploadTurns, count: int = 1, now_s: float = 0.0) -> str:
    found = [turns.take(now_s) for _ in range(count)]
    return " ".join("-" if name is None else "".join(name) for name in found)


def test_buckets_take_turns_each_in_its_order() -> None:
    assert taken(made("a1 a2 a3 b1 b2 c1"), 7) == "a1 b1 c1 a2 b2 a3 -"


def test_one_bucket_has_so_many_uploads() -> None:
    turns = made("a1 a2 a3 b1", each_max=2)
    assert taken(turns, 4) == "a1 b1 a2 -"
    assert turns.ended("a", 0.0, is_answered=True) is None
    assert taken(turns) == "a3"


def test_a_bucket_that_the_service_fails_for_waits_and_no_other_one_does() -> None:
    turns = made("a1 a2 a3 b1 b2")
    assert taken(turns) == "a1"
    assert turns.ended("a", 0.0, is_answered=False) == 0.5
    turns.add(("a", "1"))
    assert taken(turns, 3) == "b1 b2 -"
    assert taken(turns, 2, 0.5) == "a2 -", "one tries"
    assert turns.ended("a", 0.5, is_answered=False) == 1.0
    assert taken(turns, 1, 1.4) == "-"
    assert taken(turns, 2, 1.5) == "a3 -"
    assert turns.ended("a", 1.5, is_answered=False) == 2.0
    assert taken(turns, 2, 3.5) == "a1 -"
    turns.add(("a", "4"))
    turns.add(("a", "5"))
    assert turns.ended("a", 3.5, is_answered=True) is None
    assert taken(turns, 3, 3.5) == "a4 a5 -"


def test_uploads_that_began_before_a_pause_do_not_lengthen_it() -> None:
    turns = made("a1 a2 a3 a4")
    assert taken(turns, 3) == "a1 a2 a3"
    pauses = [turns.ended("a", 0.0, is_answered=False) for _ in range(3)]
    assert pauses == [0.5, None, None]
    assert taken(turns, 2, 0.5) == "a4 -"
    assert turns.ended("a", 0.5, is_answered=False) == 1.0


def test_an_answer_during_a_pause_lets_the_bucket_go_on_after_it() -> None:
    turns = made("a1 a2 a3 a4")
    assert taken(turns, 2) == "a1 a2"
    turns.ended("a", 0.0, is_answered=False)
    turns.ended("a", 0.1, is_answered=True)
    assert taken(turns, 1, 0.1) == "-"
    assert taken(turns, 2, 0.5) == "a3 a4"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_each_name_comes_once_whatever_fails(uploads: list[tuple[str, bool]]) -> None:
    turns = UploadTurns(2, 0.5, 2.0)
    for number, (bucket, _) in enumerate(uploads):
        turns.add((bucket, str(number)))
    found, now_s = list[Name](), 0.0
    running = list[Name]()
    while len(found) < len(uploads):
        while (name := turns.take(now_s)) is not None:
            running.append(name)
        for name in running:
            found.append(name)
            turns.ended(name[0], now_s, is_answered=uploads[int(name[1])][1])
        running.clear()
        now_s += 0.5
    assert sorted(found) == sorted((bucket, str(number)) for number, (bucket, _) in enumerate(uploads))
    assert turns.take(now_s + 2.0) is None
