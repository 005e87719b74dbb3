"""Values that all users in a process share: made for the first user, closed after the last."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


@dataclass(slots=True)
class _Entry(Generic[_V]):
    value: _V
    user_count: int


class Shared(Generic[_K, _V]):
    """Values by key, each with the number of its users. Safe from any thread. A forked child starts without any: the
    connections and threads behind the values are the parent's.
    """

    def __init__(self) -> None:
        self._start_empty()
        os.register_at_fork(after_in_child=self._start_empty)

    def take(self, key: _K, make: Callable[[], _V]) -> _V:
        """The value of this key, made where nobody uses one yet. `give_back` must follow. Raises what `make` raises."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(make(), 0)
            entry.user_count += 1
            return entry.value

    def give_back(self, key: _K, value: _V) -> bool:
        """One user needs the value no more. Whether it was the last, who closes the value."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.value is not value:
                return False
            entry.user_count -= 1
            if not entry.user_count:
                del self._entries[key]
            return not entry.user_count

    def _start_empty(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[_K, _Entry[_V]] = {}
