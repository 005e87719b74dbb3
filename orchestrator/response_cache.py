"""Whole answers to deterministic requests that are identical, for a tenant. Off unless it is given memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

PART_MAX = 0.125
"""Of the memory, for one answer."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer as it came: its pieces, so that a stream is a stream again."""

    content_type: str
    pieces: tuple[bytes, ...]
    until_s: float
    nbytes: int


class ResponseCache:
    """Answers by `orchestrator.rules.openai_requests.response_key`, in at most `bytes_max` bytes, for `kept_s`."""

    def __init__(self, bytes_max: int, kept_s: float) -> None:
        self._bytes_max = bytes_max
        self._kept_s = kept_s
        self._answers: OrderedDict[str, Kept] = OrderedDict()
        self.used_bytes = 0
        self.hit_count = 0

    @property
    def is_on(self) -> bool:
        """Whether it keeps anything."""
        return self._bytes_max > 0

    @property
    def answer_bytes_max(self) -> int:
        """The largest answer that is kept."""
        return int(PART_MAX * self._bytes_max)

    def find(self, key: str, now_s: float) -> Kept | None:
        """The answer; None where there is none, or it is too old."""
        kept = self._answers.get(key)
        if kept is None:
            return None
        if kept.until_s <= now_s:
            self._drop(key)
            return None
        self._answers.move_to_end(key)
        self.hit_count += 1
        return kept

    def keep(self, key: str, content_type: str, pieces: tuple[bytes, ...], now_s: float) -> None:
        """Keep an answer that came whole and well."""
        nbytes = sum(map(len, pieces)) + len(key)
        if not self.is_on or nbytes > self.answer_bytes_max:
            return
        if key in self._answers:
            self._drop(key)
        self._answers[key] = Kept(content_type, pieces, now_s + self._kept_s, nbytes)
        self.used_bytes += nbytes
        while self.used_bytes > self._bytes_max:
            self._drop(next(iter(self._answers)))

    def _drop(self, key: str) -> None:
        self.used_bytes -= self._answers.pop(key).nbytes
