"""The answers of the store that the scheduler's thread remembers."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nixl_client.connectors.vllm_tier.rules.verdicts import Question, Verdicts


def test_a_chunk_is_asked_for_once_however_often_it_is_looked_up() -> None:
    verdicts = Verdicts(2.0)
    for _ in range(3):
        for key in (b"a", b"b"):
            assert verdicts.lookup(key, "r1") is None
            assert verdicts.lookup(key, "r2") is None
    question = verdicts.take_question(0.0)
    assert question is not None
    assert question.keys == (b"a", b"b")
    assert verdicts.take_question(0.1) is None
    verdicts.answered(question, (True, False))
    assert (verdicts.lookup(b"a", "r2"), verdicts.lookup(b"b", "r1"), verdicts.is_waiting) == (True, False, False)


def test_no_answer_is_a_miss_at_the_deadline_and_a_late_one_changes_nothing() -> None:
    verdicts = Verdicts(2.0)
    verdicts.lookup(b"a", "r1")
    question = verdicts.take_question(10.0)
    assert question is not None
    assert (verdicts.expire(11.9), verdicts.lookup(b"a", "r1")) == (0, None)
    assert (verdicts.expire(12.0), verdicts.lookup(b"a", "r1")) == (1, False)
    verdicts.answered(question, (True,))
    assert verdicts.lookup(b"a", "r1") is False
    verdicts.finished("r1")
    assert verdicts.lookup(b"a", "r2") is None


def test_after_a_reset_all_that_was_looked_up_is_a_miss_also_when_an_answer_comes_later() -> None:
    verdicts = Verdicts(2.0)
    for key in (b"a", b"b"):
        verdicts.lookup(key, "r1")
    question = verdicts.take_question(0.0)
    assert question is not None
    verdicts.lookup(b"c", "r1")
    verdicts.renew()
    verdicts.answered(question, (True, True))
    assert [verdicts.lookup(key, "r1") for key in (b"a", b"b", b"c")] == [False] * 3
    assert verdicts.take_question(0.1) is None
    verdicts.finished("r1")
    assert verdicts.lookup(b"a", "r2") is None


def test_a_chunk_that_could_not_be_loaded_is_a_miss_for_who_wants_it_now() -> None:
    verdicts = Verdicts(2.0)
    verdicts.lookup(b"a", "r1")
    question = verdicts.take_question(0.0)
    assert question is not None
    verdicts.answered(question, (True,))
    verdicts.missed([b"a", b"unknown"])
    assert verdicts.lookup(b"a", "r1") is False
    verdicts.finished("r1")
    assert len(verdicts) == 0


class VerdictsMachine(RuleBasedStateMachine):
    """Requests come, ask, end; answers come late, never, or for requests that have ended."""

    @initialize()
    def begin(self) -> None:
        self.verdicts = Verdicts(5.0)
        self.now_s = 0.0
        self.open: list[tuple[float, Question]] = []
        self.wanted: dict[str, set[bytes]] = {}
        self.asked: list[bytes] = []

    @rule(key=st.integers(0, 5), request=st.integers(0, 3))
    def look_up(self, key: int, request: int) -> None:
        """The answer of a known chunk stays while a request wants it."""
        self.verdicts.lookup(bytes([key]), str(request))
        self.wanted.setdefault(str(request), set()).add(bytes([key]))

    @rule()
    def end_step(self) -> None:
        question = self.verdicts.take_question(self.now_s)
        if question is not None:
            assert len(set(question.keys)) == len(question.keys)
            self.open.append((self.now_s, question))

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.open:
            _, question = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            self.verdicts.answered(question, [data.draw(st.booleans()) for _ in question.keys])

    @rule(request=st.integers(0, 3))
    def finish(self, request: int) -> None:
        self.verdicts.finished(str(request))
        self.wanted.pop(str(request), None)

    @rule(seconds=st.floats(0.1, 4.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.verdicts.expire(self.now_s)

    @invariant()
    def remembers_no_more_than_what_is_wanted(self) -> None:
        assert len(self.verdicts) == len(set().union(*self.wanted.values()))

    @invariant()
    def every_question_ends(self) -> None:
        if self.now_s > 5.0 and not self.open:
            self.verdicts.expire(self.now_s + 5.0)
            self.verdicts.take_question(self.now_s)
            self.verdicts.expire(self.now_s + 10.0)
            assert not self.verdicts.is_waiting


TestVerdicts = VerdictsMachine.TestCase
