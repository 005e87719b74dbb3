"""Whole answers to deterministic requests that are identical, for a tenant. Off unless it is given memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

PART_MAX = 0.125
"""One answer takes no more than this fraction of the memory."""
PIECE_BYTES, ANSWER_BYTES = 64, 1024
"""The memory that Python takes for a piece beside its bytes, and for an answer beside its pieces."""
ANSWER_BYTES_MAX = 8 << 20
"""No answer that is kept is larger, however much memory there is: it is looked through as a whole."""
REPLAYED_BYTES = 1 << 16
"""An answer is replayed in pieces of about so many bytes: a client chooses how many tokens it has, each a piece."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer as it came, in pieces."""

    content_type: str
    pieces: tuple[bytes, ...]
    until_s: float
    nbytes: int


class Collected:
    """The pieces of an answer that is under way and may be kept. All such answers together take no more memory than
    the cache: one that would take more is not kept. `drop` it at its end.
    """

    def __init__(self, cache: ResponseCache) -> None:
        self._cache = cache
        self.pieces: list[bytes] = []
        self.nbytes = 0
        self.is_whole = cache.is_on
        """Whether every piece is here."""

    def add(self, piece: bytes) -> None:
        """Collect a piece."""
        nbytes = len(piece) + PIECE_BYTES
        room = min(self._cache.answer_bytes_max - self.nbytes, self._cache.bytes_max - self._cache.collecting_bytes)
        if not self.is_whole or nbytes > room:
            self.drop()
            return
        self.pieces.append(piece)
        self.nbytes += nbytes
        self._cache.collecting_bytes += nbytes

    def drop(self) -> None:
        """Collect nothing of this answer any more."""
        self._cache.collecting_bytes -= self.nbytes
        self.pieces, self.nbytes, self.is_whole = [], 0, False


def joined(pieces: Sequence[bytes]) -> tuple[bytes, ...]:
    """The same bytes in pieces of REPLAYED_BYTES, or a little more, and a last one."""
    found: list[bytes] = []
    some: list[bytes] = []
    nbytes = 0
    for piece in pieces:
        some.append(piece)
        nbytes += len(piece)
        if nbytes >= REPLAYED_BYTES:
            found.append(b"".join(some))
            some, nbytes = [], 0
    return (*found, b"".join(some)) if some else tuple(found)


class ResponseCache:
    """Answers by `orchestrator.rules.openai_requests.response_key`, in at most `bytes_max` bytes, for `kept_s`."""

    def __init__(self, bytes_max: int, kept_s: float) -> None:
        self.bytes_max = bytes_max
        self._kept_s = kept_s
        self._answers: OrderedDict[str, Kept] = OrderedDict()
        self.used_bytes = 0
        self.collecting_bytes = 0
        """The bytes of answers that are under way."""
        self.hit_count = 0

    @property
    def is_on(self) -> bool:
        """Whether it keeps anything."""
        return self.bytes_max > 0

    @property
    def answer_bytes_max(self) -> int:
        """The largest answer that is kept."""
        return min(int(PART_MAX * self.bytes_max), ANSWER_BYTES_MAX)

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

    def keep(self, key: str, content_type: str, answer: Collected, now_s: float) -> None:
        """Keep an answer that came whole and well."""
        nbytes = answer.nbytes + len(key) + len(content_type) + ANSWER_BYTES
        if not answer.is_whole or nbytes > self.answer_bytes_max:
            return
        if key in self._answers:
            self._drop(key)
        self._answers[key] = Kept(content_type, joined(answer.pieces), now_s + self._kept_s, nbytes)
        self.used_bytes += nbytes
        while self.used_bytes > self.bytes_max:
            self._drop(next(iter(self._answers)))

    def _drop(self, key: str) -> None:
        self.used_bytes -= self._answers.pop(key).nbytes
