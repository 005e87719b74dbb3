"""Which dirty chunk is uploaded next: buckets take turns, each in the order in which its chunks came. Pure: time is an
argument.

One bucket has at most `each_max` uploads under way. Where the service is busy or gone for a bucket, its chunks alone
wait for a while, and then one of them tries: it may be that bucket alone, and chunks of others come through meanwhile.

    bucket a fails, bucket b does not   ->  a's first chunk, pause, a's second, a longer pause …; all of b between them
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from heapq import heappop, heappush

from objectcache.adapters.breaker import back_off_s

Name = tuple[str, str]
"""Bucket and key."""


class UploadTurns:
    """Names that wait to be uploaded. The caller of `take` calls `ended` when the upload has ended."""

    def __init__(self, each_max: int, pause_s_min: float, pause_s_max: float) -> None:
        self._each_max = each_max
        self._pause_s_min = pause_s_min
        self._pause_s_max = pause_s_max
        self._waiting: dict[str, deque[Name]] = {}
        """The names of each bucket that has any."""
        self._turns: OrderedDict[str, None] = OrderedDict()
        """The buckets with names that may be uploaded now; the first one is next."""
        self._running: Counter[str] = Counter()
        self._failures: dict[str, int] = {}
        """Failures in a row, of buckets that have had any."""
        self._pauses: list[tuple[float, str]] = []
        """The buckets that are left alone, by the end of their pauses."""
        self._paused: set[str] = set()

    def add(self, name: Name) -> None:
        """Have a chunk uploaded, behind all others of its bucket."""
        self._waiting.setdefault(name[0], deque()).append(name)
        self._line_up(name[0])

    def take(self, now_s: float) -> Name | None:
        """The name that is uploaded next; None where none may be now."""
        while self._pauses and self._pauses[0][0] <= now_s:
            _, bucket = heappop(self._pauses)
            self._paused.discard(bucket)
            if bucket not in self._waiting and not self._running[bucket]:
                self._failures.pop(bucket, None)
            self._line_up(bucket)
        if not self._turns:
            return None
        bucket, _ = self._turns.popitem(last=False)
        names = self._waiting[bucket]
        name = names.popleft()
        if not names:
            del self._waiting[bucket]
        self._running[bucket] += 1
        self._line_up(bucket)
        return name

    def ended(self, bucket: str, now_s: float, *, is_answered: bool) -> float | None:
        """Note that an upload has ended, with an answer of the service or without one. Returns the pause of the bucket
        that begins now; None where none does.
        """
        self._running[bucket] -= 1
        if not self._running[bucket]:
            del self._running[bucket]
        pause_s = None
        if is_answered:
            self._failures.pop(bucket, None)
        elif bucket not in self._paused:  # one that began before the pause says nothing new
            failures = self._failures[bucket] = self._failures.get(bucket, 0) + 1
            pause_s = back_off_s(failures, self._pause_s_min, self._pause_s_max)
            self._paused.add(bucket)
            heappush(self._pauses, (now_s + pause_s, bucket))
            self._turns.pop(bucket, None)
        self._line_up(bucket)
        return pause_s

    def _line_up(self, bucket: str) -> None:
        """Give a bucket its turn, behind the others, if it may have one."""
        most = 1 if bucket in self._failures else self._each_max
        if bucket in self._waiting and bucket not in self._paused and self._running[bucket] < most:
            self._turns.setdefault(bucket)
