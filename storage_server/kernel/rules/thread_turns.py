"""Calls that wait for threads take turns. Owners take turns, and the files of one owner take turns. Pure.

    owner A: file 1: call, call, …      owner B: file 3: call
             file 2: call

A call has a place until it ends, or until the place is given to others, because the call is slow. Its thread is its
own until it ends. So there are bounds of the places of an owner's calls, and of the threads of an owner's and a file's.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

SEVERAL = ""
"""The file of a call that uses several files: nobody knows which of them is slow. It has no bound."""


class WaitingCall(Protocol):
    """A call that waits: the file that it uses."""

    file_id: str


CallT = TypeVar("CallT", bound=WaitingCall)


@dataclass(frozen=True, slots=True)
class TurnBounds:
    """How many places and threads the calls of one owner have at most, and how many threads those of one file."""

    owner_places: int
    owner_threads: int
    file_threads: int


class ThreadTurns(Generic[CallT]):
    """Calls that wait for a turn, or have one."""

    def __init__(self, bounds: TurnBounds, owner_of: Callable[[str], str] = str) -> None:
        self._bounds = bounds
        self._owner_of = owner_of
        self._waiting: OrderedDict[str, OrderedDict[str, OrderedDict[CallT, None]]] = OrderedDict()
        """By owners and their files: the first ones are next."""
        self._places: Counter[str] = Counter()
        """By owners."""
        self._owner_threads: Counter[str] = Counter()
        self._file_threads: Counter[str] = Counter()
        self.waiting_count = 0

    def put(self, call: CallT) -> None:
        """Have a call wait."""
        owner = self._owner(call.file_id)
        files = self._waiting.setdefault(owner, OrderedDict())
        files.setdefault(call.file_id, OrderedDict())[call] = None
        self.waiting_count += 1

    def remove(self, call: CallT) -> bool:
        """Have a call wait no more; False where it does not wait."""
        owner = self._owner(call.file_id)
        files = self._waiting.get(owner)
        calls = None if files is None else files.get(call.file_id)
        if files is None or calls is None or call not in calls:
            return False
        del calls[call]
        self.waiting_count -= 1
        if not calls:
            del files[call.file_id]
        if not files:
            del self._waiting[owner]
        return True

    def waiting_for(self, is_meant: Callable[[str], bool]) -> list[CallT]:
        """The calls that wait and use files that are meant."""
        named = (file for files in self._waiting.values() for file in files.items())
        return [call for file_id, calls in named if is_meant(file_id) for call in calls]

    def take(self) -> CallT | None:
        """The next call that may begin, which has its turn now; None where none may. Few owners and files have their
        most and are passed over, however many wait.
        """
        for owner, files in self._waiting.items():
            if self._is_below(owner):
                for file_id, calls in files.items():
                    if file_id == SEVERAL or self._file_threads[file_id] < self._bounds.file_threads:
                        return self._begin(owner, file_id, next(iter(calls)))
        return None

    def _is_below(self, owner: str) -> bool:
        has_place = self._places[owner] < self._bounds.owner_places
        return owner == SEVERAL or (has_place and self._owner_threads[owner] < self._bounds.owner_threads)

    def _begin(self, owner: str, file_id: str, call: CallT) -> CallT:
        self.remove(call)
        if file_id in self._waiting.get(owner, ()):
            self._waiting[owner].move_to_end(file_id)
        if owner in self._waiting:
            self._waiting.move_to_end(owner)
        self._places[owner] += 1
        self._owner_threads[owner] += 1
        self._file_threads[file_id] += 1
        return call

    def give_up_place(self, call: CallT) -> None:
        """A call that has its turn is slow: others take its place."""
        _less(self._places, self._owner(call.file_id))

    def end(self, call: CallT, *, has_place: bool) -> None:
        """A call that had its turn is over."""
        if has_place:
            self.give_up_place(call)
        _less(self._owner_threads, self._owner(call.file_id))
        _less(self._file_threads, call.file_id)

    def _owner(self, file_id: str) -> str:
        return SEVERAL if file_id == SEVERAL else self._owner_of(file_id)


def _less(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
