"""Which chunks are stored, as far as the scheduler's thread knows. Pure: time is an argument.

vLLM asks for every chunk of every waiting request in every step, and wants an answer at once. A chunk is asked of the
store once, with all others of that step; the answer is remembered as long as a request wants the chunk.

    unknown ── lookup ──▶ wanted ── take_question ──▶ asked ── answered ──▶ known
                                                     └── expire (no answer in time) ──▶ known: a miss
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Entry:
    """`is_stored` is None until it is known. `question` is the number of the question, 0 before it goes out."""

    is_stored: bool | None = None
    question: int = 0
    requests: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Question:
    """Keys to ask the store for, in one question."""

    number: int
    keys: tuple[bytes, ...]


class Verdicts:
    """For the thread of the scheduler alone."""

    def __init__(self, deadline_s: float) -> None:
        """A question without an answer is a miss after `deadline_s`."""
        self._deadline_s = deadline_s
        self._entries: dict[bytes, _Entry] = {}
        self._by_request: dict[str, set[bytes]] = {}
        self._wanted: list[bytes] = []
        self._asked: deque[tuple[float, Question]] = deque()
        self._question_count = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_waiting(self) -> bool:
        """Whether there is a question to ask, or to be answered."""
        return bool(self._wanted or self._asked)

    def lookup(self, key: bytes, request_id: str) -> bool | None:
        """Whether the chunk is stored; None while that is not known."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry()
            self._wanted.append(key)
        if request_id not in entry.requests:
            entry.requests.add(request_id)
            self._by_request.setdefault(request_id, set()).add(key)
        return entry.is_stored

    def take_question(self, now_s: float) -> Question | None:
        """The keys that were looked up since the last call and are not asked for yet."""
        keys = tuple([key for key in dict.fromkeys(self._wanted) if self._is_wanted(key)])
        self._wanted.clear()
        if not keys:
            return None
        self._question_count += 1
        question = Question(self._question_count, keys)
        for key in keys:
            self._entries[key].question = question.number
        self._asked.append((now_s + self._deadline_s, question))
        return question

    def answered(self, question: Question, are_stored: Sequence[bool]) -> None:
        """Note the answer, which may come after the deadline: then it changes nothing."""
        for key, is_stored in zip(question.keys, are_stored, strict=True):
            entry = self._entries.get(key)
            if entry is not None and entry.question == question.number and entry.is_stored is None:
                entry.is_stored = is_stored
        self._asked = deque(each for each in self._asked if each[1].number != question.number)

    def expire(self, now_s: float) -> int:
        """Take questions that have gone without an answer as misses; how many keys that were."""
        count = 0
        while self._asked and self._asked[0][0] <= now_s:
            _, question = self._asked.popleft()
            for key in question.keys:
                entry = self._entries.get(key)
                if entry is not None and entry.question == question.number and entry.is_stored is None:
                    entry.is_stored = False
                    count += 1
        return count

    def missed(self, keys: Iterable[bytes]) -> None:
        """These could not be loaded: the requests that want them now must compute them."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.is_stored = False

    def renew(self) -> None:
        """Nothing is stored any more of all that was looked up, whatever is answered to questions that are out."""
        self.missed(self._entries)

    def finished(self, request_id: str) -> None:
        """A request wants nothing any more."""
        for key in self._by_request.pop(request_id, ()):
            entry = self._entries[key]
            entry.requests.discard(request_id)
            if not entry.requests:
                del self._entries[key]

    def _is_wanted(self, key: bytes) -> bool:
        entry = self._entries.get(key)
        return entry is not None and not entry.question and entry.is_stored is None
