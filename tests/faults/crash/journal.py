"""What was done and what came of it, from all clients, in one order."""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.crash.model import History, Shown, Write

TAIL_ENTRIES = 60


class CrashFailure(AssertionError):
    """The server broke a promise."""


@dataclass(slots=True)
class Operation:
    """A write under way, and its effect on each key it touches."""

    number: int
    kind: str
    writes: dict[str, Write]


@dataclass(slots=True)
class Journal:
    """Thread-safe. `histories` has every key ever written; `failures` what a client saw that must not be."""

    histories: dict[str, History] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    entries: list[tuple[int, str, str]] = field(default_factory=list)
    acknowledged_count: int = 0
    in_doubt_count: int = 0
    _clock: itertools.count[int] = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _watched: tuple[str | None, threading.Event] | None = None

    def tick(self) -> int:
        """Now."""
        return next(self._clock)

    def note(self, who: str, text: str) -> int:
        """Write a line down; its time."""
        now = self.tick()
        self.entries.append((now, who, text))
        return now

    def begin(self, who: str, kind: str, results: Mapping[str, Shown], detail: str = "") -> Operation:
        """A request that changes these keys is about to be sent."""
        with self._lock:
            now = self.note(who, f"{kind} {detail} { ({key: str(shown) for key, shown in results.items()}) }")
            writes = {key: Write(result, now) for key, result in results.items()}
            for key, write in writes.items():
                self.histories.setdefault(key, History()).writes.append(write)
            self.in_doubt_count += 1
            if self._watched is not None and self._watched[0] in (None, kind):
                self._watched[1].set()
        return Operation(now, kind, writes)

    def acknowledge(self, who: str, operation: Operation) -> None:
        """The answer came: it is done."""
        with self._lock:
            now = self.note(who, f"acknowledged {operation.kind} of {operation.number}")
            for write in operation.writes.values():
                write.ended = now
            self.in_doubt_count -= 1
            self.acknowledged_count += 1

    def refuse(self, who: str, operation: Operation) -> None:
        """The answer came: it was not done."""
        with self._lock:
            self.note(who, f"refused {operation.kind} of {operation.number}")
            for key, write in operation.writes.items():
                self.histories[key].writes = [one for one in self.histories[key].writes if one is not write]
            self.in_doubt_count -= 1

    def allowed(self, key: str, began: int, ended: int) -> list[Shown]:
        """See History."""
        with self._lock:
            history = self.histories.get(key)
            return history.allowed(began, ended) if history is not None else [None]

    def snapshot(self) -> tuple[int, dict[str, History]]:
        """Now, and what every key may show."""
        with self._lock:
            return self.tick(), copy.deepcopy(self.histories)

    def settle(self, key: str, shown: Shown) -> None:
        """See History."""
        with self._lock:
            self.histories.setdefault(key, History()).settle(shown)

    def fail(self, who: str, text: str) -> None:
        """Something is wrong; the round ends with this."""
        with self._lock:
            self.note(who, f"FAILED {text}")
            self.failures.append(f"{who}: {text}")

    def watch(self, kind: str | None) -> threading.Event:
        """Set when the next operation of a kind, or of any, is about to be sent."""
        with self._lock:
            event = threading.Event()
            self._watched = (kind, event)
            return event

    def require(self) -> None:
        """Raises CrashFailure when something was wrong."""
        if self.failures:
            raise CrashFailure("\n".join(self.failures[:20]))

    def tail(self) -> str:
        """The last lines."""
        return "\n".join(f"{now:8} {who:10} {text}" for now, who, text in self.entries[-TAIL_ENTRIES:])

    def save(self, file: Path) -> None:
        """All lines, as JSON."""
        file.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries))
